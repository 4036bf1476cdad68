#!/bin/sh
# Is this GPU right? Kernels against float64, models' logits and ids against transformers, on a machine that has a
# GPU, torch, Triton, transformers and pytest, but maybe not this package: wheels of what is missing lie in .whl/.
#
#     sh benchmarks/gpu_check.sh
set -u
cd "$(dirname "$0")/.."
. benchmarks/gpu_site.sh
python3 - <<'PYTHON' || exit 1
import torch, transformers, triton
print("GPU", torch.cuda.get_device_name(0), "torch", torch.__version__, "Triton", triton.__version__)
print("transformers", transformers.__version__)
PYTHON

check() { # name, then pytest's arguments
    name=$1
    shift
    started=$(date +%s)
    python3 -m pytest -q -p no:cacheprovider --timeout 240 "$@" >"$site/log" 2>&1
    result=$?
    grep -E "^(FAILED|ERROR|E  )" "$site/log" | cut -c1-200 | head -40
    [ -n "${OUT:-}" ] && cp "$site/log" "$OUT/$name.log"
    summary="$summary$name: $(tail -1 "$site/log") [exit $result, $(($(date +%s) - started)) s]
"
}
summary=
workers=${WORKERS:-12}
check kernels -n "$workers" -m gpu tests/kernels
check logits -n 4 --dist loadscope -m gpu tests/engine/test_logits.py tests/engine/test_deepseek_logits.py
check engine -n 6 -m "not gpu and not long" tests/engine/test_parity_tiny.py tests/engine/test_pressure.py \
    tests/engine/test_sampling_parity.py tests/engine/test_chain_engine.py
check deterministic -n 6 -m gpu tests/engine/test_deterministic.py tests/engine/test_device_reader.py
if ls .cache/models/*.gguf >/dev/null 2>&1; then
    check smollm2 -n 2 -m "not gpu" tests/engine/test_parity_smollm2.py
fi
printf '\n%s' "$summary"
case $summary in *"[exit 0,"*) ;; *) exit 1 ;; esac
case $summary in *"[exit 1,"* | *"[exit 2,"* | *"[exit 4,"* | *"[exit 5,"*) exit 1 ;; esac
