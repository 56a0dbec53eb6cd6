#!/usr/bin/env bash
# The gate's verdict in nine worlds, beside what look-ahead gained there.
#   research/gate.sh                  the gate of every world, then runs of 320 tasks in the three worlds that have none
#   WORLDS='parcels kitchen' research/gate.sh
# Worlds whose tools the embedded base does not know get a base from `lfo pretrain --env` first. It needs
# pip install 'learn-from-observation[textarena]'. What has ended is kept; an interrupted run goes on.
# Gates land in research/results/gate/WORLD.json, runs in runs/gate/WORLD/ARM.
set -euo pipefail
cd "$(dirname "$0")/.."
export LFO=${LFO:-.venv/bin/lfo} OMP_NUM_THREADS=1 PYTHONPATH=${PYTHONPATH:-}:$PWD
kept=research/results/gate; mkdir -p "$kept" runs/gate
settings() {
  case $1 in
    level[1-6]) echo "levels=${1#level}" ;;
    oracle-codes) echo "env=oracle-codes" ;;
    lake) echo "env=gymnasium:FrozenLake-v1 env_args.is_slippery=false env_args.desc=[SSSS,SHSH,SSSH,HSSG]" ;;
    secretary) echo "env=textarena:Secretary-v0" ;;
    parcels) echo "env=research.worlds.parcels:Desk" ;;
    permits) echo "env=research.worlds.permits:Office" ;;
    kitchen) echo "env=research.worlds.kitchen:Orders" ;;
    valves) echo "env=research.worlds.valves:Plant" ;;
    hotline) echo "env=research.worlds.hotline:Tickets" ;;
    *) echo "unknown world $1" >&2; exit 2 ;;
  esac
}
for world in ${WORLDS:-level2 level5 level6 oracle-codes lake secretary parcels kitchen valves}; do
  set -f; read -r -a chosen <<< "$(settings "$world")"; set +f
  case $world in
    level*|oracle-codes) base=tiny ;;
    *) base=runs/gate/$world/base
      if [ ! -d "$base" ]; then
        practice=()
        for setting in "${chosen[@]}"; do
          case $setting in env=*) practice+=(--env "${setting#env=}") ;; *) practice+=(--env-arg "${setting#env_args.}") ;; esac
        done
        rm -rf "$base-unfinished"
        "$LFO" pretrain "${practice[@]}" --base tiny --output-dir "$base-unfinished"
        mv "$base-unfinished" "$base"
      fi ;;
  esac
  if [ ! -f "$kept/$world.json" ]; then
    # Exit code 1 with a report: it has found a problem in the world, such as replies that are all the same.
    "$LFO" check-env "${chosen[@]}" "model=$base" --json > "$kept/$world.unfinished" || [ -s "$kept/$world.unfinished" ]
    mv "$kept/$world.unfinished" "$kept/$world.json"
  fi
  case $world in
    parcels|permits|kitchen|valves|hotline)
      for arm in dual-lora dapo; do
        FOLDER=runs/gate/$world COMMON="preset=tiny model=$base ${chosen[*]} steps=40 eval.every=10 eval.tasks=100 checkpoint_every=20" \
          research/train_once.sh "$arm" "algo=$arm"
      done ;;
  esac
done
