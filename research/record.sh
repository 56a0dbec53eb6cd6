#!/usr/bin/env bash
# Learning from an agent that is running, without an environment and without reward: the phone-call world, level 2. The
# upstream is `lfo serve` of the bare base, which is asked as any model server would be.
#   research/record.sh                      two seeds, 200 and 500 recorded conversations
#   SEEDS=0 COUNTS='40' STEPS=10 TASKS=20 research/record.sh        a small try
# Each count records that many conversations (in all), trains the world model on them, and plays TASKS tasks of each split
# greedily: the upstream alone, with look-ahead in words, and with two controls: predictions for another task, and a memory
# of the same logs. What has ended is kept. Rows land in runs/record/seed-S/rows.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
export LFO=${LFO:-.venv/bin/lfo} PYTHON=${PYTHON:-.venv/bin/python} OMP_NUM_THREADS=1
export LFO_TOKEN=loop LFO_UPSTREAM_KEY=loop OPENAI_API_KEY=loop
steps_a_conversation=${STEPS_A_CONVERSATION:-0.5}
pids=()
end() { for pid in "${pids[@]}"; do kill -INT "$pid" 2> /dev/null || true; done; pids=(); wait || true; }
trap end EXIT
serve() {  # PORT COMMAND...: starts a server and waits for its port
  local port=$1; shift
  "$@" > "$folder/server-$port.log" 2>&1 & pids+=($!)
  for _ in $(seq 600); do
    if (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then return; fi
    if ! kill -0 "${pids[-1]}" 2> /dev/null; then cat "$folder/server-$port.log" >&2; exit 1; fi
    sleep 0.5
  done
}
play() { "$PYTHON" -m research.record_play play "http://127.0.0.1:$1" --model bare "${@:2}"; }
measured() {  # ARM COUNT PORT: one row for each split
  for split in val test_unseen_companies; do
    row=$(play "$3" --split "$split" --tasks "${TASKS:-100}")
    echo "{\"arm\": \"$1\", \"conversations\": $2, \"seed\": $seed, \"row\": $row}" | tee -a "$folder/rows.jsonl"
  done
}
for seed in ${SEEDS:-0 1}; do
  folder=runs/record/seed-$seed; logs=$folder/logs; mkdir -p "$folder"
  first=$((7500 + 10 * seed)); bare=$first; recording=$((first + 1)); looking=$((first + 2)); other=$((first + 3))
  if [ ! -d "$folder/bare" ]; then  # a run only because `lfo serve` wants one: its weights are not used
    "$LFO" train preset=tiny levels=2 algo=dapo steps=1 rollout.prompts=1 rollout.group_size=2 eval.every=0 output_dir="$folder/bare"
  fi
  serve "$bare" "$LFO" serve "$folder/bare" --adapter none --no-lookahead --port "$bare"
  [ -f "$folder/rows.jsonl" ] || measured alone 0 "$bare"
  before=0
  for count in ${COUNTS:-200 500}; do
    if [ ! -d "$logs" ]; then
      serve "$recording" "$LFO" record --upstream "http://127.0.0.1:$bare" --output "$logs" --port "$recording"
      front=$recording
    else  # the served agent itself goes on recording
      serve "$looking" "$LFO" serve "$folder/world" --upstream "http://127.0.0.1:$bare" --port "$looking" --record "$logs"
      front=$looking
    fi
    play "$front" --first $((1000 * seed + before)) --tasks $((count - before)) --temperature 1 --outcomes
    end; serve "$bare" "$LFO" serve "$folder/bare" --adapter none --no-lookahead --port "$bare"
    before=$count
    "$LFO" check-env env=logs:"$logs" --logs "$logs" --json > "$folder/check-$count.json"
    steps=${STEPS:-$("$PYTHON" -c "print(round($count * $steps_a_conversation))")}
    if [ -f "$folder/world/config.yaml" ]; then set -- --resume "$folder/world"; else
      set -- preset=tiny env=logs:"$logs" policy.frozen=true world_model.from_logs="$logs" world_model.predict=make_phone_call \
        eval.every=0 seed="$seed" output_dir="$folder/world"
    fi
    "$LFO" train "$@" steps="$steps"
    serve "$looking" "$LFO" serve "$folder/world" --upstream "http://127.0.0.1:$bare" --port "$looking"
    measured world_model "$count" "$looking"
    for predictions in shuffled memory; do
      serve "$other" "$PYTHON" -m research.record_play control "$folder/world" --upstream "http://127.0.0.1:$bare" \
        --port "$other" --predictions "$predictions" --logs "$logs"
      measured "$predictions" "$count" "$other"
      kill -INT "${pids[-1]}"; wait "${pids[-1]}" || true; unset 'pids[-1]'
    done
    end; serve "$bare" "$LFO" serve "$folder/bare" --adapter none --no-lookahead --port "$bare"
  done
  end
done
