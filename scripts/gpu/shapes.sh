#!/usr/bin/env bash
# What a step costs at 1.7, 4 and 8 billion parameters on one GPU, with random weights that are built here.
#   scripts/gpu/shapes.sh [SHAPE ...]
# First the memory of an update by part against `lfo plan` (lfo bench memory), then real steps of verl with vLLM: real
# tasks, prompts and replies, scripted calls, turns of fixed length, alternating rewards (lfo.env.scripted).
. "$(dirname "$0")/common.sh"
shapes=("$@"); [ $# -gt 0 ] || shapes=(qwen3-1.7b qwen3-4b qwen3-8b)
lfo bench memory
runs=()
for shape in "${shapes[@]}"; do
    model="$out/random-$shape"
    [ -f "$model/config.json" ] || python "$here/random_model.py" "$shape" "$model"
    for variant in "separate off" "separate policy" "stacked policy"; do
        read -r coupling lookahead <<< "$variant"
        run="$out/$shape-$coupling-$lookahead"; runs+=("$run"); rm -rf "$run"
        echo "== $shape, $coupling, look-ahead $lookahead"
        lfo train "${vllm[@]}" model="$model" env=lfo.env.scripted:ScriptedCalls env_args.levels=[2] \
            coupling="$coupling" lookahead="$lookahead" \
            rollout.max_turns=6 rollout.max_turn_tokens=64 rollout.max_context=4096 micro_batch_tokens=8192 \
            policy.max_resamples=-1 steps="${STEPS:-4}" eval.every=0 checkpoint_every=100 \
            verl.actor_rollout_ref.rollout.gpu_memory_utilization="${SHARE:-0.5}" output_dir="$run" \
            > "$run.log" 2>&1 || tail -3 "$run.log"
    done
    rm -rf "$model"
done
python "$here/table.py" "${runs[@]}"
