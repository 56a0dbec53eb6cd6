#!/usr/bin/env bash
# One run of an experiment: trains $FOLDER/NAME with $COMMON and what follows the name; goes on where it was
# interrupted, and does nothing where it has ended. Called by the scripts beside it.
set -euo pipefail
name=${1:?a name}; shift
if [ -d "$FOLDER/$name/adapters" ]; then exit; fi
if [ -f "$FOLDER/$name/config.yaml" ]; then exec "$LFO" train --resume "$FOLDER/$name"; fi
# shellcheck disable=SC2086
exec "$LFO" train $COMMON output_dir="$FOLDER/$name" "$@"
