#!/usr/bin/env bash
# What a user sees when something breaks, with vLLM and the embedded base: what is said, what is left, and that --resume goes
# on. Without compilation and graphs, since vLLM starts once for each fault and once more.
#   scripts/gpu/faults.sh [worker] [server] ...       the faults of scripts/verl_faults.py, all unless named; LIMIT seconds for each
. "$(dirname "$0")/common.sh"
names="start worker server loop balancer queue storage disk interrupt"; known "$names" "$@"
session=$(mktemp -d /tmp/lfo.XXXX); trap 'rm -rf "$session"' EXIT
RAY_TMPDIR=$session LIMIT=${LIMIT:-150} python "$root/scripts/verl_faults.py" "$out/faults" "$@" "${vllm[@]}" $servers.enforce_eager=true
