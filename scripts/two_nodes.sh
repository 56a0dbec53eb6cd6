#!/usr/bin/env bash
# Two raylets on this machine, by the commands of docs/VERL_INTEGRATION.md: a run on two nodes of one rank each must leave the
# adapters of a run on one node with two ranks. The trainer computes the log-probs that it trains on (bypass_mode=false): those of
# the servers are rounded differently in each run, because a row shares its batch with other rows.
#   scripts/two_nodes.sh FOLDER [NAME=VALUE ...]          on a CPU, where --num-gpus counts slots; some minutes on two cores
# LFO names the command (default: lfo), PORT the head's port (default: a free one).
set -euo pipefail
folder=${1:?a folder}; shift
lfo=${LFO:-lfo}; port=${PORT:-$(python -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])")}; here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"; folder=$(cd "$folder" && pwd)
settings=(engine=verl preset=tiny levels=1 rollout.prompts=2 rollout.group_size=8 policy.max_resamples=-1
    eval.every=0 steps=2 verl.algorithm.rollout_correction.bypass_mode=false "$@")
export RAY_prestart_worker_first_driver=0 RAY_USAGE_STATS_ENABLED=0
# Ray's nodes and its clients must share a token, and all be told so.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
nodes=()
trap 'for node in "${nodes[@]}"; do kill "$node" 2>/dev/null || true; done; wait; rm -rf "$session"' EXIT
session=$(mktemp -d /tmp/lfo.XXXX)  # short, since it becomes part of the names of sockets; a new one for each call
# Until a node says that it runs; one that has ended says why.
await() {
    for _ in $(seq 120); do
        grep -q "Ray runtime started" "$2" && return
        kill -0 "$1" 2>/dev/null || break
        sleep 1
    done
    echo "a node of Ray did not start:" >&2; tail -3 "$2" >&2; exit 1
}

echo "one node, two ranks"
[ -d "$folder/one/adapters" ] || rm -rf "$folder/one"  # of a call that failed
[ -d "$folder/one/adapters" ] || $lfo train "${settings[@]}" verl.trainer.n_gpus_per_node=2 output_dir="$folder/one"

rm -rf "$folder/two" "$folder/head.log" "$folder/second.log"
echo "two nodes, one rank each"
ray start --head --port="$port" --num-cpus=12 --num-gpus=1 --include-dashboard=false --temp-dir="$session/ray" --block \
    > "$folder/head.log" 2>&1 & nodes+=($!)
await "${nodes[0]}" "$folder/head.log"
ray start --address="127.0.0.1:$port" --num-cpus=12 --num-gpus=1 --block > "$folder/second.log" 2>&1 & nodes+=($!)
await "${nodes[1]}" "$folder/second.log"
$lfo train "${settings[@]}" verl.trainer.nnodes=2 verl.ray_kwargs.ray_init.address="127.0.0.1:$port" \
    output_dir="$folder/two"

python "$here/compare_adapters.py" "$folder/one" "$folder/two"
