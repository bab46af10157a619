#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under nine minutes on one H200: the gpu tests, then benchmarks/step.py.
#
# Run it from anywhere in a checkout, on a machine with CUDA, Python 3.12, torch 2.11, triton 3.6 and Transformers 5.17;
# nothing is downloaded. Results go to $OUT, else to benchmarks/results.
#
# On the lent H200 all that is imported is there (typer, rich, safetensors, accelerate, tokenizers, huggingface_hub,
# pytest-timeout too) except z-lab's package and, perhaps, a pytest new enough for pyproject.toml. Two lines here, in the
# repository's root, fetch both as wheels; name .whl in `carry` and run `bash benchmarks/gpu_check.sh`:
#
#   echo /.whl/ >> .git/info/exclude
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl dflash==0.1.0 pytest==9.2.0
#
# The exit status is that of the first part that failed; the second part runs in any case.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

PYTHON="${PYTHON:-python3}"
OUT="${OUT:-benchmarks/results}"
SITE="${SITE:-/tmp/dflash-gpu-site}"
STEP_ARGS="${STEP_ARGS:-}"
export OUT PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD/src:$PWD/kernels/torch-ext${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"

if compgen -G ".whl/*.whl" > /dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl \
    || exit 1
  export PYTHONPATH="$SITE:$PYTHONPATH"
fi

"$PYTHON" -c 'import sys, pytest, torch, transformers, triton
print("python", sys.version.split()[0], "| pytest", pytest.__version__, "| torch", torch.__version__, "| triton",
      triton.__version__, "| transformers", transformers.__version__, "|",
      torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device")' || exit 1

status=0
echo "== gpu tests"
timeout 240 "$PYTHON" -m pytest tests/gpu -m gpu -q -p no:cacheprovider -p no:xdist 2>&1 | tee "$OUT/gpu_tests.log" \
  || status=$?
echo "== step"
# shellcheck disable=SC2086  # several words on purpose
timeout 270 "$PYTHON" benchmarks/step.py $STEP_ARGS 2>&1 | tee "$OUT/step.log"
step=${PIPESTATUS[0]}
exit $((status != 0 ? status : step))
