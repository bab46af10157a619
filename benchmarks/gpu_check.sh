#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under nine minutes on one H200, what decides most first.
#
#   bash benchmarks/gpu_check.sh            on a machine with CUDA, Python 3.12, torch 2.11, triton 3.6, Transformers 5.17
#   bash benchmarks/gpu_check.sh --tiny     a rehearsal anywhere: the same parts, tiny shapes, gpu tests skipped
#
#   step      Qwen3-8B at 1 x 2k, 1 x 32k and 8 x 2k: ours, plain, z-lab's, Transformers'; parts, a profile, captures
#   checks    side by side: every file of tests/kernels and tests/gpu in a process of its own (a CUDA error ends the
#             process it happens in, and those tests only), identity.py, compute-sanitizer where it runs
#   sampled   32 x 2k, greedy and sampled              families  a mixture of experts and a hybrid, 1 x 2k
#   train     ten steps in bfloat16                    kernels   each kernel's time; attention under other tiles
#   compiled  what compiles for long: ours with compiled layers, plain with a static cache
#
# But for the checks each part has the machine to itself. Nothing is downloaded. Every part has its own limit in seconds
# (T_STEP and so on, below); what is late gets Ctrl-C, so that it says where it was, and a failure of one does not stop
# the next. Results go to $OUT, else to benchmarks/results: gpu_check.log (all output) and a JSON file per part, written
# as it goes. The last lines are a table of the parts, and the end of each failed one's log. Exit status: 0 if no part
# failed, 1 if one did, 2 if there is no CUDA.
#
# On the lent H200 all that is imported is there, but for z-lab's package and what pytest needs here. Two lines here, in
# the repository's root, fetch them as wheels (a megabyte); then name .whl in `carry` and run
# `bash benchmarks/gpu_check.sh`:
#
#   echo /.whl/ >> .git/info/exclude
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl dflash==0.1.0 pytest==9.2.0 \
#     pluggy==1.6.0 iniconfig==2.3.1 pytest-xdist==3.8.0 execnet==2.1.2 pytest-timeout==2.4.0
#
# Where the copy of the tree is no repository, GIT_COMMIT=... says what the records are of.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

TINY=""
if [[ "${1:-}" == --tiny ]]; then TINY=1; elif [[ -n "${1:-}" ]]; then
  echo "expected --tiny or nothing, got $1" >&2
  exit 2
fi
PYTHON="${PYTHON:-python3}"
OUT="${OUT:-benchmarks/results}"
T_STEP="${T_STEP:-125}" T_CHECKS="${T_CHECKS:-145}" T_SAMPLED="${T_SAMPLED:-45}" T_FAMILIES="${T_FAMILIES:-45}"
T_TRAIN="${T_TRAIN:-25}" T_KERNELS="${T_KERNELS:-64}" T_COMPILED="${T_COMPILED:-60}"
GRACE="${GRACE:-3}" # seconds between Ctrl-C and the end
SITE="${SITE:-/tmp/dflash-gpu-site}"
if [[ -n "$TINY" ]]; then
  # Times of tiny shapes are no results.
  OUT="${OUT/#benchmarks\/results//tmp/dflash-gpu-check}"
  COMMON="--tiny --repeats 1 --samples 3 --new-tokens 5"
  STEP_CELLS="1x24,1x48,2x24" SAMPLED_CELLS="4x24" OTHER_CELLS="1x24" COMPILED_CELLS="2x24"
  TRAIN_ARGS="--tiny" KERNEL_ARGS="--tiny --swept 1x24"
  IDENTITY_ARGS="--random tiny --prompts 2 --batch 1,2 --max-new-tokens 12"
else
  COMMON="--repeats 1 --samples 15 --new-tokens 33"
  STEP_CELLS="1x2048,1x32768,8x2048" SAMPLED_CELLS="32x2048" OTHER_CELLS="1x2048" COMPILED_CELLS="8x2048"
  TRAIN_ARGS="" KERNEL_ARGS="--batch 1 --context 2048,32768 --swept 1x32768,8x2048"
  IDENTITY_ARGS="--prompts 8 --batch 1,8 --max-new-tokens 128"
fi
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
LOG="$OUT/gpu_check.log"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
export OUT PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD/src:$PWD/kernels/torch-ext${PYTHONPATH:+:$PYTHONPATH}"
# The kernels themselves are meant, not Triton's interpreter.
unset TRITON_INTERPRET
: > "$LOG"

say() { echo "$@" | tee -a "$LOG"; }

if compgen -G ".whl/*.whl" > /dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl \
    2>&1 | tee -a "$LOG"
  export PYTHONPATH="$SITE:$PYTHONPATH"
fi
"$PYTHON" benchmarks/harness/environment.py 2>&1 | tee -a "$LOG"
has_cuda=${PIPESTATUS[0]}
if [[ -z "$TINY" && "$has_cuda" != 0 ]]; then
  say "expected a CUDA device that torch can use, got none (above); pass --tiny to rehearse without one"
  exit 2
fi

NAMES=()
# start NAME LIMIT COMMAND...: runs a part in the background.
start() {
  local name="$1" limit="$2"
  shift 2
  NAMES+=("$name")
  (
    began=$SECONDS
    timeout -s INT -k "$GRACE" "$limit" "$@" > "$WORK/$name.log" 2>&1 < /dev/null
    code=$?
    echo "$code $((SECONDS - began))" > "$WORK/$name.end"
  ) &
}

# collect: waits for the parts that have been started and shows the end of what they said.
collect() {
  wait
  local name code seconds
  for name in "${NAMES[@]}"; do
    [[ -f "$WORK/$name.shown" ]] && continue
    read -r code seconds < "$WORK/$name.end"
    say "== $name: exit status $code, $seconds s"
    # The log of a checker that has gone wild must not keep the others from coming back.
    tail -c 2000000 "$WORK/$name.log" >> "$LOG"
    tail -n 3 "$WORK/$name.log" | cut -c 1-240
    touch "$WORK/$name.shown"
  done
}

TESTS=("$PYTHON" -m pytest -m gpu -q --tb=short --no-showlocals --durations=3 --maxfail=12
  -o faulthandler_timeout=100 -p no:cacheprovider)
# Most of their time is compilation, on the host's cores. Not under compute-sanitizer, which follows one process.
HAS_XDIST=""
if [[ -z "$TINY" ]] && "$PYTHON" -c "import xdist" > /dev/null 2>&1; then HAS_XDIST=1; fi
# time_step NAME LIMIT ARGUMENT...: steps of random weights, alone on the machine; NAME.json is its record.
time_step() {
  local name="$1" limit="$2"
  shift 2
  # shellcheck disable=SC2086  # several words on purpose, here and below
  start "$name" "$limit" "$PYTHON" benchmarks/step.py $COMMON --budget $((limit - 12)) --out "$OUT/$name.json" "$@"
  collect
}

time_step step "$T_STEP" --cells "$STEP_CELLS" --methods ours,plain,zlab,stock
for file in tests/kernels/test_*.py tests/gpu/test_*.py; do
  name="${file#tests/}"
  name="${name%.py}"
  SPLIT=(-p no:xdist)
  if [[ -n "$HAS_XDIST" ]]; then
    SPLIT=(-n 2 --dist worksteal)
    if [[ "$name" == gpu/* ]]; then SPLIT=(-n 4 --dist worksteal); fi
  fi
  start "${name/\//-}" "$T_CHECKS" "${TESTS[@]}" "${SPLIT[@]}" "$file"
done
# shellcheck disable=SC2086
start identity "$T_CHECKS" "$PYTHON" benchmarks/identity.py $IDENTITY_ARGS
if command -v compute-sanitizer > /dev/null; then
  # It slows a kernel down a hundredfold: small shapes only. It does not run under gVisor. Torch's own cache of memory
  # would hide what lies beyond a tensor. Errors in calls of the driver are no errors of kernels, and torch makes some.
  start sanitizer "$T_CHECKS" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
    --report-api-errors no --print-limit 20 --error-exitcode 9 "${TESTS[@]}" -p no:xdist tests/kernels \
    -k "not real and not decode and not schema and not on_gpu and not compiles"
else
  say "== sanitizer: not run, compute-sanitizer is not on this machine"
fi
collect
time_step sampled "$T_SAMPLED" --cells "$SAMPLED_CELLS" --methods ours,ours/sampled,plain
time_step families "$T_FAMILIES" --cells "$OTHER_CELLS" --methods ours,plain --models qwen3-30b-a3b,qwen3.5-9b
# shellcheck disable=SC2086
start train "$T_TRAIN" "$PYTHON" benchmarks/train_steps.py $TRAIN_ARGS && collect
# shellcheck disable=SC2086
start kernels "$T_KERNELS" "$PYTHON" benchmarks/kernel_times.py $KERNEL_ARGS && collect
# Layers of Qwen3-8B are left to the kernels: what compiling them brings shows where kernels do not know the attention.
time_step compiled "$T_COMPILED" --cells "$COMPILED_CELLS" --methods ours,ours/compiled,plain/static \
  --models qwen3-8b,qwen3.5-9b

failed=()
say ""
say "part, exit status (124: late, 137: late and deaf), seconds"
for name in "${NAMES[@]}"; do
  read -r code seconds < "$WORK/$name.end"
  # Five: no test of that file wants a GPU.
  if [[ "$code" != 0 && "$code" != 5 ]]; then failed+=("$name"); fi
  say "$(printf '%-28s %4s %5s' "$name" "$code" "$seconds")"
done
for name in ${failed[@]+"${failed[@]}"}; do
  say ""
  say "== the end of $name"
  tail -n 40 "$WORK/$name.log" | cut -c 1-300 | tee -a "$LOG"
done
say ""
"$PYTHON" benchmarks/harness/floors_of.py "$OUT" 2>&1 | tee -a "$LOG"
say "$((${#NAMES[@]} - ${#failed[@]})) of ${#NAMES[@]} parts without a failure, $SECONDS s, results in $OUT"
((${#failed[@]} == 0))
