#!/usr/bin/env bash
# Rollouts of verl with vLLM beside vLLM alone, which gets the requests of the same rollouts, all of a turn at once: the difference is
# the cost of environments, agent loops and requests. The shape of SmolLM2-135M with random weights, 64 rollouts, scripted calls.
#   scripts/gpu/rollouts.sh [AGENT_LOOPS ...]      2 8 unless given
. "$(dirname "$0")/common.sh"
loops=("$@"); [ $# -gt 0 ] || loops=(2 8)
model="$out/random-smollm2-135m"; random_model smollm2-135m "$model"
runs=()
for count in "${loops[@]}"; do
    runs+=("$out/rollouts-$count")
    train "rollouts-$count" "${vllm[@]}" model="$model" "${scripted[@]}" coupling=separate lookahead=off steps="${STEPS:-6}" \
        $servers.agent.num_workers="$count"
done
python "$here/table.py" "${runs[@]}"
python "$here/bare_rollouts.py" "${runs[@]}"
