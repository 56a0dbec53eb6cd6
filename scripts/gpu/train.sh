#!/usr/bin/env bash
# SmolLM2-135M on level 2, 60 steps, look-ahead: by verl with vLLM and by the local engine; success, speed, log-prob gap.
#   scripts/gpu/train.sh [SEED ...]          seeds 0 1 2 unless given; further settings in SETTINGS
. "$(dirname "$0")/common.sh"
seeds=("$@"); [ $# -gt 0 ] || seeds=(0 1 2)
settings=(levels=2 steps="${STEPS:-60}" eval.every=20 checkpoint_every=20 ${SETTINGS:-})
runs=()
for seed in "${seeds[@]}"; do
    for engine in verl local; do
        run="$out/train-$engine-$seed"; runs+=("$run")
        [ -d "$run/adapters" ] && continue
        place=(device=cuda); [ $engine = verl ] && place=("${vllm[@]}")
        echo "== $engine, seed $seed"
        lfo train "${smollm2[@]}" "${place[@]}" "${settings[@]}" seed="$seed" output_dir="$run" 2>&1 | tee "$run.log" | grep -a "^starting\|^step\|^lfo" || true
    done
done
python "$here/table.py" "${runs[@]}"
