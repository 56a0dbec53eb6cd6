#!/usr/bin/env bash
# One run of an experiment: trains $FOLDER/NAME with $COMMON and what follows the name; goes on where it was
# interrupted, and does nothing where it has ended. With HOURS it is ended so many hours after its last start, for good:
# on a core of its own these are core-hours, and what it has not reached by then is censored. Called by the scripts beside it.
set -euof pipefail  # no file name stands for a setting in brackets
name=${1:?a name}; shift
run=$FOLDER/$name
if [ -f "$run/out-of-time" ]; then exit; fi
if [ -f "$run/config.yaml" ]; then
  # Adapters are the last thing that a run writes; those of one that was given more steps since are old.
  steps=$(sed -n 's/^steps: //p' "$run/config.yaml")
  if [ -d "$run/adapters" ] && tail -n 1 "$run/metrics.jsonl" | grep -q "^{\"step\": $steps,"; then exit; fi
  set -- --resume "$run"
else
  # shellcheck disable=SC2086
  set -- $COMMON output_dir="$run" "$@"
fi
if [ -z "${HOURS:-}" ]; then exec "$LFO" train "$@"; fi
status=0
timeout --foreground --signal=INT "${HOURS}h" "$LFO" train "$@" || status=$?
if [ "$status" = 124 ]; then touch "$run/out-of-time"; exit; fi
exit "$status"
