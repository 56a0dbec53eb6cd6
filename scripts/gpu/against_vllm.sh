#!/usr/bin/env bash
# Our sampler and vLLM in turns on one GPU, each shape in a process of its own: from which size on is vLLM the better server?
. "$(dirname "$0")/common.sh"
for shape in smollm2-135m qwen3-1.7b qwen3-8b; do
    lfo bench rollout --against vllm --device cuda --shapes "$shape" --rows "${ROWS:-16,64,256}"
done
