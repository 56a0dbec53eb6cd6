#!/usr/bin/env bash
# Two worlds that others wrote, on the embedded base taught how their tools are called and nothing else. One core a run.
#   research/foreign.sh              both worlds, every arm, seeds 0 to 2, two runs at a time
#   WORLDS=lake ARMS='dual|dapo' SEEDS=0 research/foreign.sh 4
#   DEVICE=cuda HOURS=0.167 research/foreign.sh 4    on a GPU, each run ended after ten minutes
# It needs pip install 'learn-from-observation[textarena]', and no download.
#   lake        Gymnasium's FrozenLake-v1 with its usual 4x4 map, not slippery. The agent is told the number of its field and nothing of
#               the map, which is the same in every task: where the holes and the goal are carries over. A task begins on any of the 11 fields that
#               are safe (`desc` with each of them a start; with the one usual start a greedy evaluation is all or nothing). Random play wins 9 %, who knows the map 100 %.
#               A reply tells where a move led, never whether that was good: what look-ahead shows there is of use only to a policy that knows the fields.
#   secretary   TextArena's Secretary-v0: five values one by one, accept one; won if it was the highest. How often a value wins at
#               which draw carries over, and a reply to `accept` says whether it did; random play wins 22 %, who knows the distribution at best 64 %.
# Names of few states are numbers here that matter, so none are swapped (world_model.swap_names=0), and states are not cut short.
# Runs land in runs/foreign/WORLD/ARM-SEED, the bases beside them; what has ended is kept. Then: lfo compare runs/foreign/lake --baseline 'dapo ...'
set -euof pipefail
cd "$(dirname "$0")/.."
export LFO=${LFO:-.venv/bin/lfo} HOURS=${HOURS:-12} OMP_NUM_THREADS=1
# shellcheck disable=SC2034
lake="gymnasium:FrozenLake-v1 is_slippery=false desc=[SSSS,SHSH,SSSH,HSSG]" secretary="textarena:Secretary-v0"
steps=${STEPS:-150} device=${DEVICE:-cpu}
arms() {
  local shared="coupling=shared lookahead=off exploration.blind_share=0"
  for seed in ${SEEDS:-0 1 2}; do
    echo "dapo-$seed seed=$seed steps=$steps algo=dapo"
    echo "dapo-64-$seed seed=$seed steps=$steps algo=dapo rollout.group_size=64"
    echo "echo-$seed seed=$seed steps=$steps $shared world_model.input=inline world_model.predict=all world_model.weight=${ECHO:-0.03}"
    echo "imitation-$seed seed=$seed steps=$steps algo=dapo internalise.rows=8 internalise.teacher=policy"
    echo "dual-$seed seed=$seed steps=$steps"
    echo "internalise-$seed seed=$seed algo=internalise internalise.until=0 steps=$steps"
    echo "frozen-$seed seed=$seed steps=$steps policy.frozen=true"
    echo "shuffled-$seed seed=$seed steps=$steps lookahead_source=shuffled"
  done
}
for world in ${WORLDS:-lake secretary}; do
  read -r env arguments <<< "${!world}"
  of_pretrain=() of_train=()
  for argument in $arguments; do of_pretrain+=(--env-arg "$argument") of_train+=("env_args.$argument"); done
  export FOLDER=runs/foreign/$world
  chosen=$(arms | grep -E "^(${ARMS:-.*})-[0-9]+ ") || { echo "no arm matches ARMS=$ARMS" >&2; exit 2; }
  if [ -n "${DRY:-}" ]; then echo "$world:"; echo "$chosen"; continue; fi
  base=$FOLDER/base
  if [ ! -d "$base" ]; then
    rm -rf "$base-unchecked"
    "$LFO" pretrain --env "$env" "${of_pretrain[@]}" --base tiny --steps 60 --conversations 120 --row 640 --output-dir "$base-unchecked" --device "$device"
    "$LFO" pretrain --env "$env" "${of_pretrain[@]}" --check --tasks "${CHECKED:-500}" --row 640 --model "$base-unchecked" --device "$device"
    mv "$base-unchecked" "$base"
  fi
  export COMMON="preset=tiny device=$device model=$base env=$env ${of_train[*]} world_model.swap_names=0
    world_model.wording=1 world_model.state_tokens=384 world_model.examples_per_mini_batch=6 eval.every=10 eval.tasks=200 checkpoint_every=50 ${EXTRA:-}"
  xargs -P "${1:-2}" -L 1 research/train_once.sh <<< "$chosen" || failed=1
done
exit "${failed:-0}"
