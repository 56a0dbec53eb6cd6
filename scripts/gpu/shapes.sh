#!/usr/bin/env bash
# What a step costs at 1.7, 4 and 8 billion parameters on one GPU, with random weights that are built here.
#   scripts/gpu/shapes.sh [SHAPE ...] [VARIANT ...]
# Shapes: qwen3-1.7b qwen3-4b qwen3-8b. Variants: off (no look-ahead), policy (with look-ahead).
# All, unless named. Real steps of verl with vLLM, with scripted calls. MEMORY=1: first the memory of an update by part against `lfo plan`.
export SHARE=${SHARE:-0.5} CACHE_GIB=${CACHE_GIB:-40}
. "$(dirname "$0")/common.sh"
all_shapes="qwen3-1.7b qwen3-4b qwen3-8b"; all_variants="off policy"; known "$all_shapes $all_variants" "$@"
shapes=(); variants=()
for name; do if [[ $name == qwen* ]]; then shapes+=("$name"); else variants+=("$name"); fi; done
[ -z "${MEMORY:-}" ] || lfo bench memory
runs=()
for shape in $all_shapes; do
    chosen "$shape" "${shapes[@]}" || continue
    model="$out/random-$shape"
    random_model "$shape" "$model"
    for variant in $all_variants; do
        chosen "$variant" "${variants[@]}" || continue
        runs+=("$out/$shape-$variant")
        train "$shape-$variant" "${vllm[@]}" model="$model" "${scripted[@]}" \
            lookahead="$variant" steps="${STEPS:-3}"
    done
    rm -rf "$model"
done
python "$here/table.py" "${runs[@]}"
