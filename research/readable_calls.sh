#!/usr/bin/env bash
# Does a base that has practised the syntax of an environment's tools call them readably, and is it no better than random
# play? For three environments that others wrote: `lfo pretrain --env` and then its `--check` on 500 rollouts. (An older
# Gymnasium has Taxi-v3 and no v4: set ENVS.)
#   research/readable_calls.sh                        SmolLM2-135M, after `lfo models fetch smollm2-135m`: on a GPU
#   BASE=tiny DEVICE=cpu research/readable_calls.sh   the embedded base
# Bases land in runs/readable-BASE/NAME and what the check found in NAME.json; those that are there are kept. Set ENVS (names
# with spaces), STEPS, CONVERSATIONS, TASKS, ROW, LFO or PYTHON as you like. The last lines are the shares of readable turns.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${BASE:-smollm2-135m} device=${DEVICE:-auto} lfo=${LFO:-.venv/bin/lfo}
folder=runs/readable-$base
mkdir -p "$folder"
for env in ${ENVS:-gymnasium:FrozenLake-v1 gymnasium:Taxi-v4 textarena:FrozenLake-v0}; do
  name=${env//[^A-Za-z0-9]/-}
  if [ ! -d "$folder/$name" ]; then
    "$lfo" pretrain --env "$env" --base "$base" --device "$device" --output-dir "$folder/$name" \
      ${STEPS:+--steps "$STEPS"} ${CONVERSATIONS:+--conversations "$CONVERSATIONS"} ${ROW:+--row "$ROW"}
  fi
  if [ ! -s "$folder/$name.json" ]; then
    # It exits with 1 where the base falls short; the figures are wanted all the same.
    "$lfo" pretrain --check --env "$env" --model "$folder/$name" --device "$device" --tasks "${TASKS:-500}" \
      ${ROW:+--row "$ROW"} --json > "$folder/$name.tmp" || [ -s "$folder/$name.tmp" ]
    mv "$folder/$name.tmp" "$folder/$name.json"
  fi
done
for found in "$folder"/*.json; do
  "${PYTHON:-.venv/bin/python}" - "$found" <<'PYTHON'
import json, pathlib, sys

path = pathlib.Path(sys.argv[1])
found = json.loads(path.read_text())
base, random = found["base"], found["random"]
print(f"{path.stem}: {found['readable']:.1%} of {found['turns']} turns readable; success {base['success']:.1%}, "
      f"random play {random['success']:.1%}; {'ok' if found['ok'] else '; '.join(found['problems'])}")
PYTHON
done
