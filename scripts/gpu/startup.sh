#!/usr/bin/env bash
# From the command to the end of the first step, by part: vLLM as it is set, with what it has compiled before, without
# compilation, without graphs; and our own servers on the GPU.
#   scripts/gpu/startup.sh [VARIANT ...]     vllm vllm-again vllm-not-compiled vllm-eager own-servers: all, unless named
. "$(dirname "$0")/common.sh"
variants="vllm vllm-again vllm-not-compiled vllm-eager own-servers"; known "$variants" "$@"
runs=()
start() {
    local name=$1; shift
    runs+=("$out/startup-$name")
    train "startup-$name" "${smollm2[@]}" "$@" levels=2 steps="${STEPS:-2}" eval.every=0
}
not_compiled=$servers.engine_kwargs.vllm.compilation_config='{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'
for variant in $variants; do
    chosen "$variant" "$@" || continue
    case $variant in
        vllm | vllm-again) start "$variant" "${vllm[@]}" ;;
        vllm-not-compiled) start "$variant" "${vllm[@]}" "$not_compiled" ;;
        vllm-eager) start "$variant" "${vllm[@]}" $servers.enforce_eager=true ;;
        own-servers) start "$variant" "${own_servers[@]}" ;;
    esac
done
python "$here/table.py" "${runs[@]}"
