#!/usr/bin/env bash
# Does an instruct model act on what it reads, and can a memory teach it without any training?
#   MODEL=FOLDER research/instruct.sh                       the gate with each form, then runs of 40 tasks with a frozen policy
#   MODEL=FOLDER DEVICE=cuda JOBS=14 research/instruct.sh   the same on a GPU, and the world model alone for 320 tasks, all at a time
# MODEL is an instruct model with a chat template that describes tools. Two worlds with one try a task: the first reply says
# what was needed, too late for this task. On a CPU a base of half a billion parameters needs hours: what has ended is kept.
# Gates land in research/results/instruct/WORLD-FORM.json, runs in runs/instruct/WORLD-SOURCE.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${MODEL:?a folder with an instruct model}
export LFO=${LFO:-.venv/bin/lfo} DEVICE=${DEVICE:-cpu} PYTHONPATH=${PYTHONPATH:-}:$PWD TASKS=${TASKS:-24}
export KEPT=${KEPT:-research/results/instruct} FOLDER=${FOLDER:-runs/instruct}
export SETTINGS="model=$model device=$DEVICE rollout.max_context=1024 rollout.max_turn_tokens=96 rollout.max_turns=4 ${EXTRA:-}"
mkdir -p "$KEPT" "$FOLDER"
gate() {
  [ -f "$KEPT/$1-$2.json" ] && exit
  # shellcheck disable=SC2086
  $LFO check-env "env=$3" $SETTINGS "imagine.form=$2" --gate "$TASKS" --json > "$KEPT/$1-$2.unfinished"
  mv "$KEPT/$1-$2.unfinished" "$KEPT/$1-$2.json"
}
# Four tasks a step, two rollouts each, sampled colder than usual: at temperature 1 the calls of small instruct models break.
learn() {
  COMMON="$SETTINGS preset=${PRESET:-tiny} env=$3 rollout.prompts=4 rollout.group_size=2 rollout.temperature=0.5
    eval.tasks=${EVALUATED:-30} eval.splits=[val] eval.final_splits=[test_unseen] policy.frozen=true ${*:4}" \
    research/train_once.sh "$1-$2"
}
export -f gate learn
{
  for world in parcels:Desk permits:Office; do
    for form in mark tool user; do echo "gate ${world%:*} $form research.worlds.$world"; done
  done
  few="steps=10 eval.every=5 checkpoint_every=5"
  many="rollout.prompts=8 steps=40 eval.every=10 checkpoint_every=20"
  for world in parcels:Desk permits:Office; do
    to="${world%:*}" env="research.worlds.$world"
    echo "learn $to memory $env $few lookahead_source=memory world_model.weight=0"
    echo "learn $to memory_first $env $few lookahead_source=memory_first world_model.examples_per_mini_batch=4"
    # The world model alone, for a GPU: how many replies does it need? On a CPU only what a step costs.
    dual="policy.frozen=false policy.learning_rate=3e-5"
    if [ "$DEVICE" = cpu ]; then
      echo "learn $to dual $env $few rollout.prompts=2 rollout.group_size=4 world_model.examples_per_mini_batch=4 $dual"
    else
      echo "learn $to world_model $env $many"
      echo "learn $to dual $env $many rollout.group_size=4 $dual"
    fi
  done
} | grep -E "${ONLY:-.}" | xargs -P "${JOBS:-1}" -I{} bash -c '{}'
