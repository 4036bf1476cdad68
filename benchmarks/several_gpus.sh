#!/bin/sh
# Models over several GPUs of one host, checked and measured in one call.
#
#     sh benchmarks/several_gpus.sh GPUS PART...
#
# Parts, in the order given: check (two GPUs answer as one does), sums (all-reduce by size), plan (memory a GPU),
# MODEL:GPUS[:LAYERS[:WORKLOADS]], as deepseek-v2:2:26:decode-1,decode-16, and profile:MODEL:GPUS[:LAYERS] (a decode
# step's kernels). RUNS runs (1) after a warm-up; a part that takes longer than LIMIT s (240) is ended; CHECK chooses
# among the checks as pytest's -k does. Lines of results go to $OUT or the working folder.
set -u
cd "$(dirname "$0")/.."
. benchmarks/gpu_site.sh
gpus=$1
shift
out=${OUT:-.}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
commit=${COMMIT:-$(git describe --always --dirty=+ 2>/dev/null || echo unknown)}
began=$(date +%s)
for part in "$@"; do
    printf '\n== %s, %s s after the start\n' "$part" $(($(date +%s) - began))
    case $part in
    check)
        timeout "${LIMIT:-240}" python3 -m pytest -q -p no:cacheprovider --timeout 200 -n 6 -m gpu -rA \
            -k "${CHECK:-test}" tests/engine/test_ranks_on_gpus.py >"$out/check.log" 2>&1
        grep -E "^(FAILED|ERROR|E  |.*mean .* alone)" "$out/check.log" | cut -c1-200
        tail -1 "$out/check.log"
        ;;
    sums) timeout 60 python3 -m limpet.benchmarks.all_reduce --gpus "$gpus" ;;
    plan) python3 -m limpet.benchmarks.memory_plan --tp 2 4 8 ;;
    profile:*)
        rest=${part#*:}:
        model=${rest%%:*}
        rest=${rest#*:}
        tp=${rest%%:*}
        layers=$(echo "${rest#*:}" | tr -d :)
        timeout "${LIMIT:-240}" python3 -m limpet.benchmarks.breakdown --model "$model" --tp "$tp" \
            ${layers:+--layers "$layers"} --batches 1 64 2>&1 | cut -c1-110
        ;;
    *:*)
        model=${part%%:*}
        rest=${part#*:}:::
        tp=${rest%%:*}
        rest=${rest#*:}
        layers=${rest%%:*}
        rest=${rest#*:}
        workloads=${rest%%:*}
        # shellcheck disable=SC2086
        timeout "${LIMIT:-240}" python3 -m limpet.benchmarks.engine --model "$model" --tp "$tp" ${layers:+--layers $layers} \
            ${workloads:+--parts $(echo "$workloads" | tr , ' ')} --runs "${RUNS:-1}" --commit "$commit" \
            --output "$out/engine.jsonl" 2>&1 | grep -v "CUDA graph [0-9]"
        ;;
    *)
        echo "no part of that name" >&2
        exit 2
        ;;
    esac
done
printf '\n%s s in all\n' $(($(date +%s) - began))
