#!/usr/bin/env bash
# How many replies the world model needs, for every recipe, beside its rivals: the table of research/LOG.md.
#   research/world_model_bench.sh                        all variants, seeds 0 to 4, one after the other: about 30 minutes on one core
#   VARIANTS='tiny|retrieve-1' SEEDS='2 3' CALLS=100 TASKS=40,80,160 research/world_model_bench.sh
# Each seed is a file runs/world-model-bench/VARIANT-SEED.json; those that are there are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
python=${PYTHON:-.venv/bin/python} folder=runs/world-model-bench
plain="world_model.learning_rate=2e-3 world_model.lora_plus=1 world_model.swap_names=0 world_model.wording=1"
variants() {
  echo "tiny"
  echo "twelve-examples $plain world_model.examples_per_mini_batch=12"
  echo "three-examples $plain world_model.examples_per_mini_batch=3"
  echo "retrieve-1 --variant=retrieve-1"
  echo "retrieve-2 --variant=retrieve-2"
  echo "rivals --rivals-only"
  for law in 1 2 3; do echo "rivals-law-$law --rivals-only env_args.law=$law"; done
  # Why the linear classifier is ahead after 40 tasks: the same replies, and more updates.
  for times in 1 2 4; do echo "early-again-$times --variant=again-$times --tasks=40 --calls=100"; done
}
chosen=$(variants | grep -E "^(${VARIANTS:-.*})( |$)") || { echo "no variant matches VARIANTS=$VARIANTS" >&2; exit 2; }
mkdir -p "$folder"
while read -r name settings; do
  for seed in ${SEEDS:-0 1 2 3 4}; do
    file=$folder/$name-$seed.json
    [ -s "$file" ] && continue
    echo "$name, seed $seed" >&2
    # shellcheck disable=SC2086
    "$python" -m research.world_model_bench --json --tasks "${TASKS:-40,80,160,320}" --calls "${CALLS:-200}" seed="$seed" $settings \
      > "$file.part" < /dev/null
    mv "$file.part" "$file"
  done
done <<< "$chosen"
