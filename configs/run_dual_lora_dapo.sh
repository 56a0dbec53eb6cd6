#!/usr/bin/env bash
# Dual-LoRA DAPO on verl: configs/run_dual_lora_dapo.sh [NAME=VALUE ...]
#   configs/run_dual_lora_dapo.sh output_dir=runs/dual verl.trainer.nnodes=2
#   configs/run_dual_lora_dapo.sh preset=tiny engine=verl steps=3      the same on a CPU
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec lfo train "config=$here/dual_lora_config.yaml" output_dir=runs/dual-lora "$@"
