# Sourced by the scripts of this folder, which read these variables:
#   SITE       on a machine where nothing can be installed: the folder of packages that was unpacked there, with its env.sh;
#              elsewhere `pip install 'learn-from-observation[vllm]'` has been here before
#   OUT        the folder for runs, logs and caches
#   MODEL      a folder that takes the place of the preset's model
#   LIMIT      seconds that one run may take
#   SHARE      of the GPU that must be free when a vLLM starts; CACHE_GIB of it are for keys and values. Several runs share a
#              GPU: vLLM would otherwise measure what is left, and fails when a neighbour gives memory back meanwhile
# A run that fails is a row of the table like any other. Scripts may run side by side, and again after a failure.
#   SITE=/path/to/site OUT=/path/for/runs LIMIT=300 scripts/gpu/train.sh 0
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); root=$(cd "$here/../.." && pwd)
if [ -n "${SITE:-}" ]; then set +u; . "$SITE/env.sh"; set -u; fi
out=${OUT:-$root/runs/gpu}; mkdir -p "$out"; out=$(cd "$out" && pwd)
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
# What one run compiles, a later one finds, whichever script starts it.
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$out/cache/vllm} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$out/cache/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/cache/triton} RAY_memory_monitor_refresh_ms=0
servers=verl.actor_rollout_ref.rollout
ray_memory=verl.ray_kwargs.ray_init.object_store_memory=2000000000
vllm=(engine=verl device=cuda $servers.name=vllm "$ray_memory" $servers.gpu_memory_utilization="${SHARE:-0.15}"
    $servers.engine_kwargs.vllm.kv_cache_memory_bytes=$((${CACHE_GIB:-8} << 30)))
own_servers=(engine=verl device=cuda "$ray_memory")
smollm2=(preset=smollm2-135m ${MODEL:+model=$MODEL})
# Real steps with random weights: tasks, prompts and replies are real, a script makes the calls, turns have a fixed length
# and rewards alternate (benchmarks.scripted).
scripted=(env=benchmarks.scripted:ScriptedCalls "env_args.levels=[2]" rollout.max_turns=6 rollout.max_turn_tokens=64
    rollout.max_context=4096 micro_batch_tokens=8192 rollout.mini_batch_prompts=8 policy.max_resamples=-1 eval.every=0 checkpoint_every=100)
lfo() { timeout -k 15 "${LIMIT:-600}" python -W ignore -c 'from lfo.cli import main; main()' "$@"; }

# One run with a Ray of its own: train NAME SETTING ...   The logs of its processes are kept in NAME.ray if it failed, or if KEEP_LOGS is set.
train() {
    local name=$1 began=$SECONDS code=0 session; shift
    local run="$out/$name"; rm -rf "$run" "$run.log" "$run.ray"
    session=$(mktemp -d /tmp/lfo.XXXX)  # short: it becomes part of the names of sockets
    RAY_TMPDIR=$session lfo train "$@" output_dir="$run" > "$run.log" 2>&1 || code=$?
    [ $code -eq 124 ] && echo "ran past the ${LIMIT:-600} s that it may take" >> "$run.log"
    echo "== $name: exit code $code after $((SECONDS - began)) s, with the end of all processes"
    grep -a "^starting: .* s$" "$run.log"
    if [ $code -ne 0 ] || [ -n "${KEEP_LOGS:-}" ]; then
        mkdir -p "$run.ray"; cp "$session"/ray/session_latest/logs/worker-*.{out,err} "$run.ray/" 2> /dev/null
    fi
    if [ $code -ne 0 ]; then
        grep -av "^$" "$run.log" | tail -1
        grep -ahE "^[^ ].*(Error|Exception)\b.*: " "$run.ray"/* 2> /dev/null | sort | uniq -c | sort -rn | head -3
    fi
    rm -rf "$session"
}

# A base of this shape with random weights, made once: random_model SHAPE FOLDER
random_model() { [ -f "$2/tokenizer_config.json" ] || python "$here/random_model.py" "$1" "$2"; }

# Whether NAME is among the names that were given, or none were given: chosen NAME [GIVEN ...]
chosen() { local name=$1; shift; [ $# -eq 0 ] || [[ " $* " == *" $name "* ]]; }

# Refuse names that are none of those: known "NAME NAME ..." [GIVEN ...]
known() {
    local names=$1 given; shift
    for given; do [[ " $names " == *" $given "* ]] || { echo "$given is none of: $names" >&2; exit 2; }; done
}
