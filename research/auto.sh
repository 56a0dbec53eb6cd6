#!/usr/bin/env bash
# One setting for every world: algo=auto beside the fixed arms, in seven worlds. One core a run; what has ended is kept, what was interrupted goes on.
#   research/auto.sh                        every world and arm, seeds 0 to 2, one run at a time
#   WORLDS='lake level2' ARMS='auto|dual' SEEDS=0 research/auto.sh 2
#   DRY=1 research/auto.sh                  only prints the runs
# 320 tasks, evaluated every 40; develop on seed 10, report seeds 0 to 2 (3 and 4 where intervals meet). Then, for each world:
#   lfo compare runs/auto/WORLD --baseline 'dapo ...'
# Rows beside auto: without a world model (memory: look-ahead from the memory alone), without DAPO (no-dapo: its rate is 1e-9), and a policy that
# is frozen beside the memory and the world model (frozen). lake and secretary need pip install 'learn-from-observation[textarena]'; their base is
# taught how their tools are called and nothing else, as in foreign.sh. Two worlds of tests/worlds were drawn by the hash of
# the commit that fixed the rule, before auto ran in any of them (nor in oracle-codes):
#   for w in kiln darkroom labels clinic coldstore yard; do echo "$(echo "$w 4b883576ed03c419da9a67c0bc3dc2da6fd01cb0" | sha256sum) $w"; done | sort | head -2
set -euof pipefail
cd "$(dirname "$0")/.."
export LFO=${LFO:-.venv/bin/lfo} OMP_NUM_THREADS=1 PYTHONPATH=${PYTHONPATH:-}:$PWD:$PWD/tests
root=${FOLDER:-runs/auto} steps=${STEPS:-40} device=${DEVICE:-cpu}
foreign="world_model.swap_names=0 world_model.wording=1 world_model.state_tokens=384 world_model.examples_per_mini_batch=6"
settings_of() {
  case $1 in
    level2 | level6) echo "levels=${1#level} eval.splits=val,test_unseen_companies eval.final_splits=test_unseen_rules" ;;
    oracle) echo "env=oracle-codes" ;;
    lake) echo "env=gymnasium:FrozenLake-v1 env_args.is_slippery=false env_args.desc=[SSSS,SHSH,SSSH,HSSG] model=$root/lake/base $foreign" ;;
    secretary) echo "env=textarena:Secretary-v0 model=$root/secretary/base $foreign" ;;
    kiln) echo "env=worlds.kiln:Kiln" ;; darkroom) echo "env=worlds.darkroom:Darkroom" ;; labels) echo "env=worlds.labels:Labels" ;;
    clinic) echo "env=worlds.clinic:Clinic" ;; coldstore) echo "env=worlds.coldstore:ColdStore" ;; yard) echo "env=worlds.yard:Yard" ;;
    *) echo "unknown world $1" >&2; exit 2 ;;
  esac
}
arms() {
  for seed in ${SEEDS:-0 1 2}; do
    echo "auto-$seed seed=$seed algo=auto"
    echo "dapo-$seed seed=$seed algo=dapo"
    echo "imitation-$seed seed=$seed algo=dapo internalise.rows=8 internalise.teacher=policy"
    echo "feedback-$seed seed=$seed algo=feedback"
    echo "dual-$seed seed=$seed algo=dual-lora"
    echo "memory-first-$seed seed=$seed algo=dual-lora lookahead_source=memory_first"
    echo "internalise-$seed seed=$seed algo=internalise steps=$steps"
    echo "auto-memory-$seed seed=$seed algo=auto lookahead_source=memory world_model.weight=0"
    echo "auto-no-dapo-$seed seed=$seed algo=auto policy.learning_rate=1e-9"
    echo "frozen-$seed seed=$seed algo=dual-lora policy.frozen=true lookahead_source=memory_first imagine.drafts=4"
  done
}
for world in ${WORLDS:-level2 level6 lake secretary oracle labels coldstore}; do
  settings=$(settings_of "$world")
  chosen=$(arms | grep -E "^(${ARMS:-.*})-[0-9]+ ") || { echo "no arm matches ARMS=$ARMS" >&2; exit 2; }
  if [ -n "${DRY:-}" ]; then echo "$world: $settings"; echo "$chosen"; continue; fi
  export FOLDER=$root/$world
  base=$FOLDER/base
  if [[ $settings == *model=$base* ]] && [ ! -d "$base" ]; then
    of_pretrain=()
    for each in $settings; do case $each in env=*) of_pretrain+=(--env "${each#env=}") ;; env_args.*) of_pretrain+=(--env-arg "${each#env_args.}") ;; esac; done
    rm -rf "$base-unfinished"
    "$LFO" pretrain "${of_pretrain[@]}" --base tiny --steps 60 --conversations 120 --row 640 --output-dir "$base-unfinished" --device "$device"
    mv "$base-unfinished" "$base"
  fi
  export COMMON="preset=tiny device=$device steps=$steps eval.every=5 eval.tasks=${TASKS:-200} checkpoint_every=20 $settings ${EXTRA:-}"
  xargs -P "${1:-1}" -L 1 research/train_once.sh <<< "$chosen" || failed=1
done
exit "${failed:-0}"
