#!/usr/bin/env bash
# A worker and a server killed, a full disk, Ctrl-C, with vLLM: what is said, what is left, and that --resume goes on.
. "$(dirname "$0")/common.sh"
rm -rf "$out/faults"
python "$root/scripts/verl_faults.py" "$out/faults" "${vllm[@]}"
