#!/usr/bin/env bash
# From nothing to a trained agent in worlds that the embedded base has never seen: six of tests/worlds, held out from the
# development of practice, or others.
#   research/own_worlds.sh                            gate and arms of all six, one after the other
#   WORLDS='kiln clinic' ARMS='dual' SEEDS='0 1' JOBS=2 research/own_worlds.sh
# `lfo` practises the tools of each world once, beside its runs. What has ended is kept; an interrupted run goes on.
# Gates land in research/results/own-worlds/WORLD.json, runs in runs/own-worlds/WORLD/ARM-SEED.
set -euo pipefail
cd "$(dirname "$0")/.."
export LFO=${LFO:-.venv/bin/lfo} OMP_NUM_THREADS=1 PYTHONPATH=${PYTHONPATH:-}:$PWD:$PWD/tests
export KEPT=${KEPT:-research/results/own-worlds} RUNS=${RUNS:-runs/own-worlds}
mkdir -p "$KEPT" "$RUNS"
class_of() {
  case $1 in
    kiln) echo worlds.kiln:Kiln ;; darkroom) echo worlds.darkroom:Darkroom ;; labels) echo worlds.labels:Labels ;;
    clinic) echo worlds.clinic:Clinic ;; coldstore) echo worlds.coldstore:ColdStore ;; yard) echo worlds.yard:Yard ;;
    *) echo "unknown world $1" >&2; exit 2 ;;
  esac
}
one() {
  local world=$1 class=$2 arm=$3 seed=$4
  if [ "$arm" = gate ]; then
    [ -f "$KEPT/$world.json" ] && return
    "$LFO" check-env "env=$class" "output_dir=$RUNS/$world/gate" --json > "$KEPT/$world.unfinished" || [ -s "$KEPT/$world.unfinished" ]
    mv "$KEPT/$world.unfinished" "$KEPT/$world.json"
    return
  fi
  local settings=()
  case $arm in
    dual) settings=(algo=dual-lora) ;;
    memory) settings=(algo=dual-lora lookahead_source=memory world_model.weight=0) ;;
    feedback) settings=(algo=feedback) ;;
    dapo) settings=(algo=dapo) ;;
    *) echo "unknown arm $arm" >&2; exit 2 ;;
  esac
  FOLDER=$RUNS/$world COMMON="preset=tiny env=$class steps=40 eval.every=10 eval.tasks=60 eval.splits=[val,test_unseen] checkpoint_every=20 seed=$seed" \
    research/train_once.sh "$arm-$seed" "${settings[@]}"
}
export -f one
for world in ${WORLDS:-kiln darkroom labels clinic coldstore yard}; do
  class=$(class_of "$world")
  echo "$world $class gate 0"
done | xargs -P "${JOBS:-1}" -L1 bash -c 'set -euo pipefail; one "$@"' _
for seed in ${SEEDS:-0 1}; do
  for arm in ${ARMS:-dual dapo memory feedback}; do
    for world in ${WORLDS:-kiln darkroom labels clinic coldstore yard}; do
      echo "$world $(class_of "$world") $arm $seed"
    done
  done
done | xargs -P "${JOBS:-1}" -L1 bash -c 'set -euo pipefail; one "$@"' _
