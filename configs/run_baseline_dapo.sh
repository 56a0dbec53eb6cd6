#!/usr/bin/env bash
# Plain DAPO on verl, everything else as in run_dual_lora_dapo.sh: configs/run_baseline_dapo.sh [NAME=VALUE ...]
set -euo pipefail
exec lfo train preset=qwen3-8b-8x24gb algo=dapo output_dir=runs/baseline "$@"
