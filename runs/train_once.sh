#!/usr/bin/env bash
# One run of an experiment: trains $FOLDER/NAME with $COMMON and what follows the name; goes on where it was
# interrupted, and does nothing where it has ended. Called by the scripts beside it.
set -euo pipefail
name=${1:?a name}; shift
run=$FOLDER/$name
if [ -f "$run/config.yaml" ]; then
  # Adapters are the last thing that a run writes; those of one that was given more steps since are old.
  steps=$(sed -n 's/^steps: //p' "$run/config.yaml")
  if [ -d "$run/adapters" ] && tail -n 1 "$run/metrics.jsonl" | grep -q "^{\"step\": $steps,"; then exit; fi
  exec "$LFO" train --resume "$run"
fi
# shellcheck disable=SC2086
exec "$LFO" train $COMMON output_dir="$run" "$@"
