#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under nine minutes on one H200: kernel parity in float32, float16 and
# bfloat16, the gpu tests, the kernels' times, benchmarks/step.py, and compute-sanitizer over the kernels where it runs.
#
# Run it from anywhere in a checkout, on a machine with CUDA, Python 3.12, torch 2.11, triton 3.6 and Transformers 5.17;
# nothing is downloaded. Results go to $OUT, else to benchmarks/results: gpu_check.log, kernels.json, kernels.png and
# step.json. Each part has a limit of its own, and all of them together $TOTAL seconds: what is late is cut.
#
# On the lent H200 all that is imported is there (typer, rich, safetensors, accelerate, tokenizers, huggingface_hub,
# hypothesis, matplotlib, pytest-timeout too) except z-lab's package and, perhaps, a pytest new enough for
# pyproject.toml. Two lines here, in the repository's root, fetch both as wheels; name .whl in `carry` and run
# `bash benchmarks/gpu_check.sh`:
#
#   echo /.whl/ >> .git/info/exclude
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl dflash==0.1.0 pytest==9.2.0
#
# The exit status is that of the first part that failed; later parts run in any case.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

PYTHON="${PYTHON:-python3}"
OUT="${OUT:-benchmarks/results}"
SITE="${SITE:-/tmp/dflash-gpu-site}"
STEP_ARGS="${STEP_ARGS:-}"
KERNEL_ARGS="${KERNEL_ARGS:-}"
TOTAL="${TOTAL:-535}"
export OUT PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD/src:$PWD/kernels/torch-ext${PYTHONPATH:+:$PYTHONPATH}"
# The kernels themselves are meant, not Triton's interpreter.
unset TRITON_INTERPRET
mkdir -p "$OUT"
: > "$OUT/gpu_check.log"

if compgen -G ".whl/*.whl" > /dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl \
    || exit 1
  export PYTHONPATH="$SITE:$PYTHONPATH"
fi

"$PYTHON" -c 'import sys, pytest, torch, transformers, triton
print("python", sys.version.split()[0], "| pytest", pytest.__version__, "| torch", torch.__version__, "| triton",
      triton.__version__, "| transformers", transformers.__version__, "|",
      torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device")' \
  2>&1 | tee -a "$OUT/gpu_check.log" || exit 1

status=0
# part NAME LIMIT COMMAND...: runs a command for at most LIMIT seconds of what is left.
part() {
  local name="$1" limit="$2" left=$((TOTAL - SECONDS)) code
  shift 2
  if ((left < 5)); then
    echo "== $name: no time left" | tee -a "$OUT/gpu_check.log"
    code=124
  else
    echo "== $name" | tee -a "$OUT/gpu_check.log"
    timeout $((left < limit ? left : limit)) "$@" 2>&1 | tee -a "$OUT/gpu_check.log"
    code=${PIPESTATUS[0]}
    echo "== $name: exit status $code, ${SECONDS}s since the start" | tee -a "$OUT/gpu_check.log"
  fi
  ((status != 0)) || status=$code
}

TESTS=("$PYTHON" -m pytest -m gpu -q --no-showlocals -p no:cacheprovider -p no:xdist)
part "kernel parity" 150 "${TESTS[@]}" tests/kernels
part "gpu tests" 180 "${TESTS[@]}" tests/gpu
# shellcheck disable=SC2086  # several words on purpose
part "kernel times" 120 "$PYTHON" benchmarks/kernel_times.py $KERNEL_ARGS
# shellcheck disable=SC2086
part "step" 200 "$PYTHON" benchmarks/step.py $STEP_ARGS
if command -v compute-sanitizer > /dev/null; then
  # The tests of small shapes: it slows a kernel down a hundredfold. It does not run under gVisor.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 part "compute-sanitizer" 90 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "${TESTS[@]}" tests/kernels -k "not real and not decode and not schema and not on_gpu"
else
  echo "== compute-sanitizer: not on this machine" | tee -a "$OUT/gpu_check.log"
fi
exit "$status"
