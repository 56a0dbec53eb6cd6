#!/usr/bin/env bash
# SmolLM2-135M on level 2, 60 steps, look-ahead: by verl with vLLM and by the local engine; success, speed, log-prob gap.
# All runs at the same time; those that have finished before are kept.
#   scripts/gpu/train.sh [SEED ...]          seeds 0 1 2 unless given; ENGINES="verl local", further settings in SETTINGS
. "$(dirname "$0")/common.sh"
seeds=("$@"); [ $# -gt 0 ] || seeds=(0 1 2)
settings=(levels=2 steps="${STEPS:-60}" eval.every="${EVAL_EVERY:-20}" checkpoint_every=20 ${SETTINGS:-})
runs=()
for seed in "${seeds[@]}"; do
    for engine in ${ENGINES:-verl local}; do
        name="train-$engine-$seed"; runs+=("$out/$name")
        [ -d "$out/$name/adapters" ] && continue
        place=(device=cuda); [ "$engine" = verl ] && place=("${vllm[@]}")
        train "$name" "${smollm2[@]}" "${place[@]}" "${settings[@]}" seed="$seed" &
    done
done
wait
python "$here/table.py" "${runs[@]}"
