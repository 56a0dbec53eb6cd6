#!/usr/bin/env bash
# When the rules change: an agent is trained under one law, then the law is another one. What does each arm need to get back to 90 % of
# the old success? Phone calls (level 2, law 0 -> LAW; plain RL on level 6, where it learns at all) and oracle-codes (other codes).
#   research/change.sh                                 phone calls, law 0 -> 1: every arm but `rl`, seeds 0 to 2, one run at a time
#   WORLD=oracle research/change.sh                    oracle-codes, seed 0 of the world -> seed 1
#   LAW=2 ARMS='alone|logs' SEEDS=0 research/change.sh 2
#   WORLD=level6 ARMS='base|rl|alone' research/change.sh
#   WORLD=quiet SEEDS='0 1 ... 19' research/change.sh  runs in which nothing changes: how often does the alarm cry wolf?
#   research/change.py table research/results/change   the tables, from kept runs (runs/change while it goes on)
# Runs land in runs/change/WORLD-lawLAW/ARM-SEED, metrics and configs of those that have ended in research/results/change. What has
# ended is kept, what was interrupted goes on. An arm first trains the base that it recovers from.
set -euo pipefail
cd "$(dirname "$0")/.."
export LFO=${LFO:-.venv/bin/lfo} PYTHON=${PYTHON:-.venv/bin/python} OMP_NUM_THREADS=1
export PATH=$(dirname "$PYTHON"):$PATH  # of research/change.py
world=${WORLD:-phone} law=${LAW:-1} bases=$world
case $world in
  phone|quiet) own="levels=2" changed="env_args.law=$law" unseen=test_unseen_companies; bases=phone ;;
  level6) own="levels=6" changed="env_args.law=$law" unseen=test_unseen_companies ;;
  oracle) own="env=oracle-codes rollout.max_turns=4 rollout.max_context=512" changed="env_args.seed=$law" unseen=test_unseen_oracles ;;
  *) echo "unknown WORLD=$world" >&2; exit 2 ;;
esac
export RUNS=${RUNS:-runs/change} KEPT=${KEPT:-research/results/change} BASES=$bases-base RECOVERED=$world-law$law
export CHANGED="$changed" SETTINGS="preset=tiny $own eval.tasks=100 eval.splits=val,$unseen checkpoint_every=20 ${EXTRA:-}"
# Recoveries are shorter than the first training.
steps=${STEPS:-40} trained=${TRAINED:-60}
keep() {  # copy what the tables need of a run that has ended
  local run=$1 kept=$KEPT/${1#"$RUNS/"}
  mkdir -p "$kept"
  cp "$run"/config.yaml "$run"/data.json "$kept/"
  [ ! -f "$run/old_rules.json" ] || cp "$run/old_rules.json" "$kept/"
  gzip -c -n "$run/metrics.jsonl" > "$kept/metrics.jsonl.gz"
}
base() {  # KIND SEED settings...
  local kind=$1 seed=$2; shift 2
  FOLDER=$RUNS/$BASES COMMON="$SETTINGS eval.every=10 steps=$trained seed=$seed" research/train_once.sh "$kind-$seed" "$@"
  keep "$RUNS/$BASES/$kind-$seed"
}
recover() {  # ARM KIND SEED HOW settings...: go on from the base of a kind under the other law, with tasks that it has not seen
  local arm=$1 kind=$2 seed=$3 how=$4 name=$1-$3 from=$RUNS/$BASES/$2-$3 lfo=$LFO forgets=yes; shift 4
  case $how in
    product) ;;                                    # the weights, as `lfo train --from`
    carried) lfo=research/change.py ;;             # and what the base has heard; an alarm lets it forget
    never) lfo=research/change.py forgets=no ;;    # and it is never forgotten
    none) from=none ;;                             # from nothing
  esac
  FORGETS=$forgets LFO=$lfo FOLDER=$RUNS/$RECOVERED COMMON="$SETTINGS $CHANGED eval.every=4 steps=$steps seed=$((seed + 100)) init_from=$from" \
    research/train_once.sh "$name" "$@"
  [ -f "$RUNS/$RECOVERED/$name/old_rules.json" ] || "$PYTHON" research/change.py old "$RUNS/$RECOVERED/$name" "$RUNS/$BASES/$kind-$seed"
  keep "$RUNS/$RECOVERED/$name"
}
one() {
  local arm=$1 seed=$2 frozen=policy.frozen=true memory="lookahead_source=memory world_model.weight=0 policy.frozen=true"
  local rl="algo=dapo optimizer.constant=true policy.learning_rate=1e-3 rollout.group_size=64 rollout.max_context=640 policy.overlong_buffer=240"
  local imitate="algo=internalise"
  case $arm in
    base) base dual "$seed" ;;
    alone|carried|never|whole|logs) base dual "$seed" ;;
    memory*) base memory "$seed" $memory ;;
    internalised) base internalise "$seed" $imitate "steps=${IMITATED:-160}" eval.every=20 ;;
    rl) base rl "$seed" $rl "steps=${REINFORCED:-120}" ;;
  esac
  case $arm in
    alone) recover alone dual "$seed" product $frozen ;;
    carried) recover carried dual "$seed" carried $frozen ;;
    never) recover never dual "$seed" never $frozen ;;
    whole) recover whole dual "$seed" product ;;
    scratch) base dual "$seed"; recover scratch dual "$seed" none "steps=$trained" ;;
    logs)
      local logs=$RUNS/$RECOVERED/logs-$seed.jsonl
      mkdir -p "$RUNS/$RECOVERED"
      # shellcheck disable=SC2086
      [ -f "$logs" ] || "$PYTHON" research/change.py logs "$RUNS/$BASES/dual-$seed" "$logs" --tasks "${LOGGED:-320}" "seed=$((seed + 100))" $CHANGED
      recover logs dual "$seed" product $frozen "world_model.from_logs=$logs" ;;
    memory-carried) recover memory-carried memory "$seed" carried $memory ;;
    memory-never) recover memory-never memory "$seed" never $memory ;;
    memory-emptied) recover memory-emptied memory "$seed" product $memory ;;
    internalised) recover internalised internalise "$seed" product $imitate "steps=${IMITATED:-160}" eval.every=10 ;;
    rl) recover rl rl "$seed" product $rl "steps=${REINFORCED:-120}" eval.every=5 ;;
    base) ;;
    quiet)  # as the base of phone calls, without evaluation
      FOLDER=$RUNS/quiet COMMON="$SETTINGS eval.every=0 steps=$trained seed=$seed" research/train_once.sh "quiet-$seed"
      keep "$RUNS/quiet/quiet-$seed" ;;
    *) echo "unknown arm $arm" >&2; exit 2 ;;
  esac
}
if [ "${1:-}" = one ]; then one "$2" "$3"; exit; fi
all="alone logs carried never whole scratch memory-emptied memory-carried memory-never internalised"
[ "$world" = quiet ] && all=quiet
for seed in ${SEEDS:-0 1 2}; do
  for arm in $all rl base; do
    if [ -n "${ARMS:-}" ]; then [[ $arm =~ ^(${ARMS})$ ]] || continue; elif [ "$arm" = rl ] || [ "$arm" = base ]; then continue; fi
    echo "$arm $seed"
  done
done > "/tmp/change-$$"
if [ -n "${DRY:-}" ]; then cat "/tmp/change-$$"; rm "/tmp/change-$$"; exit; fi
# Arms of a seed share its base: jobs run seeds side by side, never two arms of one.
export -f one base recover keep
export steps trained
status=0
for seed in ${SEEDS:-0 1 2}; do echo "$seed"; done | xargs -P "${1:-1}" -I '{}' bash -c '
  set -euo pipefail
  grep " {}$" "/tmp/change-'$$'" | while read -r arm seed; do one "$arm" "$seed" < /dev/null; done' || status=$?
rm "/tmp/change-$$"
[ ! -d "$KEPT" ] || "$PYTHON" research/change.py table "$KEPT"
exit "$status"
