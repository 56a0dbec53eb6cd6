#!/usr/bin/env bash
# Our sampler and vLLM in turns on one GPU, each shape in a process of its own: from which size on is vLLM the better server?
#   scripts/gpu/against_vllm.sh [SHAPE ...]      smollm2-135m qwen3-1.7b qwen3-8b unless named; ROWS=16,64,256
. "$(dirname "$0")/common.sh"
shapes=("$@"); [ $# -gt 0 ] || shapes=(smollm2-135m qwen3-1.7b qwen3-8b)
for shape in "${shapes[@]}"; do
    began=$SECONDS code=0
    lfo bench rollout --against vllm --device cuda --shapes "$shape" --rows "${ROWS:-16,64,256}" 2> "$out/against-$shape.log" || code=$?
    echo "== $shape: exit code $code after $((SECONDS - began)) s"
    [ $code -eq 0 ] || grep -av "^$" "$out/against-$shape.log" | tail -2
done
