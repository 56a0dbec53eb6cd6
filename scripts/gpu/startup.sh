#!/usr/bin/env bash
# From the command to the end of the first step, by part: vLLM as it is set, without compilation, without graphs; and our
# own servers on the GPU.
. "$(dirname "$0")/common.sh"
start() {
    local name=$1; shift
    local run="$out/startup-$name" began=$SECONDS
    rm -rf "$run"
    lfo train "${smollm2[@]}" "$@" levels=2 steps=1 eval.every=0 output_dir="$run" > "$run.log" 2>&1 || tail -3 "$run.log"
    echo "== $name: $((SECONDS - began)) s, with the end of all processes"
    grep -a "^starting: .* s$" "$run.log" || true
    runs+=("$run")
}
runs=()
start vllm "${vllm[@]}"
start vllm-again "${vllm[@]}"
start vllm-not-compiled "${vllm[@]}" verl.actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config='{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'
start vllm-eager "${vllm[@]}" verl.actor_rollout_ref.rollout.enforce_eager=true
start own-servers engine=verl device=cuda
python "$here/table.py" "${runs[@]}"
