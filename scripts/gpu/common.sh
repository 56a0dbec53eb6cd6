# Sourced by the scripts of this folder. On a machine where nothing can be installed, SITE is the folder of packages that
# was unpacked there, with its env.sh; elsewhere `pip install 'learn-from-observation[vllm]'` has been here before.
#   SITE=/path/to/site OUT=/path/for/runs scripts/gpu/train.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); root=$(cd "$here/../.." && pwd)
if [ -n "${SITE:-}" ]; then set +u; . "$SITE/env.sh"; set -u; fi
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore
out=${OUT:-$root/runs/gpu}; mkdir -p "$out"
lfo() { python -W ignore -c 'from lfo.cli import main; main()' "$@"; }
vllm=(engine=verl device=cuda verl.actor_rollout_ref.rollout.name=vllm)
# MODEL: a folder that takes the place of the preset's model.
smollm2=(preset=smollm2-135m ${MODEL:+model=$MODEL})
python -c 'import vllm, verl, torch; assert torch.cuda.is_available()' || { echo "no GPU, or no vLLM, or no verl here" >&2; exit 1; }
