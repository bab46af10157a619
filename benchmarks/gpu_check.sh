#!/usr/bin/env bash
# Everything that needs a GPU, in parts that can be chosen, what decides most first.
#
#   bash benchmarks/gpu_check.sh                          all parts, on a machine with CUDA
#   PARTS="smoke step" bash benchmarks/gpu_check.sh       these parts, in this order
#   bash benchmarks/gpu_check.sh --tiny                   a rehearsal anywhere: the same parts, tiny shapes, ten times the
#                                                         time
#   PARTS=... bash benchmarks/gpu_check.sh --plan         says what each part would get of the time, and runs nothing
#
#   smoke        every engine once, four layers of Qwen3-8B: what does not work at all (smoke.py)
#   gemm         what cuBLAS makes of Qwen3-8B's weights at 16 to 512 rows, and beside it our products in one launch, at
#                16 and 32 rows (gemm_times.py)
#   step         Qwen3-8B, 1 x 2k, 1 x 32k, 8 x 2k: the defaults, chains, plain, z-lab's, Transformers'; parts, kernels,
#                gaps between them, captures (step.py)
#   checks       each file of tests/gpu and tests/kernels in a process of its own (a CUDA error ends the process it
#                happens in, and those tests only), and identity.py; $JOBS side by side
#   widths       batch 1, 8, 32 at 2k: a step at trees of 64 and 32 nodes, and at widths 16 to 4
#   sampled      1 and 32 x 2k: Qwen3's own sampling and temperature 1 beside greedy
#   experiments  1 x 2k: dependent launches, forked projections, prefetched weights, products in one launch, beside the
#                step as it is
#   families     a mixture of experts and a hybrid, 1 x 2k
#   kernels      each kernel's time; attention under other tiles (kernel_times.py)
#   compiled     8 x 2k: plain with a static cache, the fair baseline, beside ours: Inductor takes most of it
#   train        ten training steps in bfloat16
#   sanitizer    compute-sanitizer over tests/kernels, where it is installed; it does not run under gVisor
#
# Every part gets its own limit in seconds (T_SMOKE and so on, below; T_STEP, T_WIDTHS, T_SAMPLED, T_EXPERIMENTS and
# T_FAMILIES are of one cell), or what is left of TOTAL if that is less. A cell of step.py is a process of its own. What
# is late gets Ctrl-C, so that it says where it was. A part for which no time is left is skipped, which counts as a
# failure. A failure stops nothing.
#
# $OUT, else benchmarks/results, gets two files: gpu_check.log (what is said here), and results.tar.gz, written anew
# after every part: the records (JSON) and the last 300 kB of each process's log. The last lines are a table of the
# processes, the end of each failed one's log, and the floors.
# Exit status: 0 if no part failed, 1 if one did, 2 if there is no CUDA or something else was asked for than there is.
#
# On a machine that is lent for 15 minutes, each start of which takes half a minute: two calls, of at most 390 and 370
# seconds (a limit of the lender's own has to leave some more). Floors are asked of an H200: that kind has to be named.
#
#   TOTAL=390 PARTS="smoke step checks" STEP_CELLS=1x2048 bash benchmarks/gpu_check.sh
#   TOTAL=370 PARTS="experiments widths kernels gemm" WIDTH_CELLS=1x2048,8x2048 bash benchmarks/gpu_check.sh
#
# What is left then: the other cells of step, sampled, families, compiled, train, sanitizer.
#
# All that is imported is there on the lent machines (Python 3.12, torch 2.11, Triton 3.6, Transformers 5.17), but for
# z-lab's package and a pytest that is new enough. Two lines here, in the repository's root, fetch them as wheels (a
# megabyte); then name .whl in `carry` of every call:
#
#   echo /.whl/ >> .git/info/exclude
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl dflash==0.1.0 pytest==9.2.0 \
#     pluggy==1.6.0 iniconfig==2.3.1 pytest-xdist==3.8.0 execnet==2.1.2 pytest-timeout==2.4.0
#
# At most 64 MiB travel. Two folders of demos take most of the tree and are not needed there. This leaves them out of
# the checkout that travels (24 MiB are left; all parts were rehearsed in such a one), and brings them back afterwards:
#
#   git sparse-checkout set --no-cone '/*' '!/demos/smollm2/draft/' '!/demos/toy/vision/'
#   git sparse-checkout disable
#
# GIT_COMMIT=... says what the records are of, where the copy of the tree does not know it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

ALL_PARTS="smoke gemm step checks widths sampled experiments families kernels compiled train sanitizer"
TINY="" PLAN=""
case "${1:-}" in
  "") ;;
  --tiny) TINY=1 ;;
  --plan) PLAN=1 ;;
  *)
    echo "expected --tiny, --plan or nothing, got $1; choose parts by PARTS" >&2
    exit 2
    ;;
esac
PARTS="${PARTS-$ALL_PARTS}"
if [[ -z "${PARTS// /}" ]]; then
  echo "expected parts among $ALL_PARTS in PARTS, got none; name some, or leave PARTS out for all" >&2
  exit 2
fi
for part in $PARTS; do
  if [[ " $ALL_PARTS " != *" $part "* ]]; then
    echo "expected parts among $ALL_PARTS in PARTS, got $part; choose of those" >&2
    exit 2
  fi
done

PYTHON="${PYTHON:-python3}"
# A rehearsal is on a machine that is slower than what it rehearses for.
PATIENCE=1
if [[ -n "$TINY" ]]; then PATIENCE=10; fi
TOTAL="${TOTAL:-$((550 * PATIENCE))}"
if [[ ! "$TOTAL" =~ ^[0-9]+$ ]]; then
  echo "expected whole seconds in TOTAL, got $TOTAL; leave it out for 550" >&2
  exit 2
fi
T_SMOKE="${T_SMOKE:-80}" T_GEMM="${T_GEMM:-40}" T_STEP="${T_STEP:-80}" T_CHECKS="${T_CHECKS:-200}"
T_WIDTHS="${T_WIDTHS:-45}" T_SAMPLED="${T_SAMPLED:-60}" T_EXPERIMENTS="${T_EXPERIMENTS:-110}"
T_FAMILIES="${T_FAMILIES:-60}" T_KERNELS="${T_KERNELS:-100}" T_COMPILED="${T_COMPILED:-150}" T_TRAIN="${T_TRAIN:-60}"
T_SANITIZER="${T_SANITIZER:-60}"
GRACE="${GRACE:-3}"       # seconds between Ctrl-C and the end
RESERVED="${RESERVED:-5}" # seconds of TOTAL for the table at the end
LEAST="${LEAST:-5}"       # a part that would get fewer seconds is skipped
SITE="${SITE:-/tmp/dflash-gpu-site}"
DEST="${OUT:-benchmarks/results}"
if [[ -n "$TINY" ]]; then
  # Times of tiny shapes are no results.
  DEST="${DEST/#benchmarks\/results//tmp/dflash-gpu-check}"
  JOBS="${JOBS:-1}"
  COMMON="--tiny --repeats 1 --samples 3 --new-tokens 5"
  SHORT=24 LONG=48
  STEP_CELLS="${STEP_CELLS:-1x$SHORT,1x$LONG,2x$SHORT}" WIDTH_CELLS="${WIDTH_CELLS:-2x$SHORT}"
  SAMPLED_CELLS="${SAMPLED_CELLS:-1x$SHORT,4x$SHORT}"
  WIDTHS="16,8,4" SMALL="--tiny" SWEPT="1x$SHORT"
  IDENTITY_ARGS="--random tiny --prompts 2 --batch 1,2 --max-new-tokens 12" KERNEL_ARGS="--tiny"
else
  JOBS="${JOBS:-8}"
  COMMON="--repeats 1 --samples 15 --new-tokens 33 --ours-tokens 129"
  SHORT=2048 LONG=32768
  STEP_CELLS="${STEP_CELLS:-1x$SHORT,1x$LONG,8x$SHORT}" WIDTH_CELLS="${WIDTH_CELLS:-1x$SHORT,8x$SHORT,32x$SHORT}"
  SAMPLED_CELLS="${SAMPLED_CELLS:-1x$SHORT,32x$SHORT}"
  WIDTHS="64,32,16,8,4" SMALL="" SWEPT="1x$LONG,8x$SHORT"
  IDENTITY_ARGS="--prompts 4 --batch 1,8 --max-new-tokens 64" KERNEL_ARGS="--batch 1 --context $SHORT,$LONG"
fi
FAMILIES="qwen3-30b-a3b,qwen3.5-9b"

# count LIST: how many words a list with commas has.
count() { awk -F, '{ print NF }' <<< "$1"; }

# limit_of PART: the seconds that a part may take, all its cells together.
limit_of() {
  local seconds=0
  case "$1" in
    smoke) seconds="$T_SMOKE" ;;
    gemm) seconds="$T_GEMM" ;;
    step) seconds=$((T_STEP * $(count "$STEP_CELLS"))) ;;
    checks) seconds="$T_CHECKS" ;;
    widths) seconds=$((T_WIDTHS * $(count "$WIDTH_CELLS"))) ;;
    sampled) seconds=$((T_SAMPLED * $(count "$SAMPLED_CELLS"))) ;;
    experiments) seconds="$T_EXPERIMENTS" ;;
    families) seconds=$((T_FAMILIES * $(count "$FAMILIES"))) ;;
    kernels) seconds="$T_KERNELS" ;;
    compiled) seconds="$T_COMPILED" ;;
    train) seconds="$T_TRAIN" ;;
    sanitizer) seconds="$T_SANITIZER" ;;
  esac
  echo $((seconds * PATIENCE))
}

# share LIMIT LEFT: the seconds that a part gets of those that are left; 0 if that is too little to begin.
share() {
  local seconds="$1"
  if (($2 < seconds)); then seconds="$2"; fi
  if ((seconds < LEAST)); then seconds=0; fi
  echo "$seconds"
}

if [[ -n "$PLAN" ]]; then
  left=$((TOTAL - RESERVED - GRACE))
  for part in $PARTS; do
    seconds="$(share "$(limit_of "$part")" "$left")"
    echo "$part $seconds of $(limit_of "$part")"
    left=$((left - seconds))
  done
  echo "left $left"
  exit 0
fi

mkdir -p "$DEST"
DEST="$(cd "$DEST" && pwd)"
LOG="$DEST/gpu_check.log"
WORK="$(mktemp -d)"
RECORDS="$WORK/records" LOGS="$WORK/logs" ENDS="$WORK/ends"
mkdir "$RECORDS" "$LOGS" "$ENDS"
# What a script writes by itself goes there too, never beside the two files.
export OUT="$RECORDS"
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD/src:$PWD/kernels/torch-ext${PYTHONPATH:+:$PYTHONPATH}"
# The kernels themselves are meant, not Triton's interpreter.
unset TRITON_INTERPRET
: > "$LOG"

say() { echo "$@" | tee -a "$LOG"; }

# pack: writes results.tar.gz anew, whole or not at all.
pack() {
  local packed="$WORK/packed" file
  rm -rf "$packed"
  mkdir -p "$packed/logs"
  for file in "$RECORDS"/*.json; do
    if [[ -f "$file" ]]; then cp "$file" "$packed"; fi
  done
  for file in "$LOGS"/*.log; do
    # The log of a checker that has gone wild must not keep the others from coming back.
    if [[ -f "$file" ]]; then tail -c 300000 "$file" > "$packed/logs/${file##*/}"; fi
  done
  tar -czf "$DEST/results.part" -C "$packed" . && mv "$DEST/results.part" "$DEST/results.tar.gz"
}

# Whoever ends this early still gets what there is.
leave() {
  local running
  running="$(jobs -pr)"
  # shellcheck disable=SC2086  # several words on purpose, here and below
  if [[ -n "$running" ]]; then kill $running 2> /dev/null; fi
  pack
  rm -rf "$WORK"
}
trap leave EXIT
trap 'exit 143' TERM INT

if compgen -G ".whl/*.whl" > /dev/null; then
  timeout 30 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" \
    .whl/*.whl 2>&1 | tee -a "$LOG"
  export PYTHONPATH="$SITE:$PYTHONPATH"
fi
timeout 60 "$PYTHON" benchmarks/harness/environment.py 2>&1 | tee -a "$LOG"
has_cuda=${PIPESTATUS[0]}
if [[ -z "$TINY" && "$has_cuda" != 0 ]]; then
  say "expected a CUDA device that torch can use, got none (above); pass --tiny to rehearse without one"
  exit 2
fi

NAMES=()
DEADLINE=0 # of the part that runs, in seconds since the beginning

# begin PART: sets the deadline of a part; fails if there is no time for it.
begin() {
  local seconds
  seconds="$(share "$(limit_of "$1")" $((TOTAL - RESERVED - GRACE - SECONDS)))"
  DEADLINE=$((SECONDS + seconds))
  say "== part $1: $seconds s"
  ((seconds > 0))
}

# skip NAME: what is not run because no time is left.
skip() {
  NAMES+=("$1")
  echo "skipped 0" > "$ENDS/$1"
  echo "no time was left" > "$LOGS/$1.log"
}

# start NAME SECONDS COMMAND...: runs a process of a part in the background.
start() {
  local name="$1" limit="$2"
  shift 2
  NAMES+=("$name")
  (
    began=$SECONDS
    timeout -s INT -k "$GRACE" "$limit" "$@" > "$LOGS/$name.log" 2>&1 < /dev/null &
    # Whoever ends this process means the one inside.
    trap 'kill $!' TERM
    wait $!
    code=$?
    echo "$code $((SECONDS - began))" > "$ENDS/$name"
  ) &
}

# collect: waits for what has been started, shows the end of what it said, and packs.
collect() {
  wait
  local name code seconds
  for name in ${NAMES[@]+"${NAMES[@]}"}; do
    if [[ -f "$ENDS/$name.shown" ]]; then continue; fi
    read -r code seconds < "$ENDS/$name"
    say "== $name: exit status $code, $seconds s"
    tail -n 3 "$LOGS/$name.log" | cut -c 1-240
    touch "$ENDS/$name.shown"
  done
  pack
}

# one NAME COMMAND...: runs a process with all that is left of its part.
one() {
  local name="$1"
  shift
  start "$name" $((DEADLINE - SECONDS)) "$@"
  collect
}

# time_cells PART CELLS MODELS ARGUMENT...: step.py for each model and cell in turn, each alone on the machine and in a
# process of its own, which gets its share of what is left of the part.
time_cells() {
  local part="$1" cells="$2" models="$3" model cell name seconds waiting
  shift 3
  waiting=$(($(count "$cells") * $(count "$models")))
  for model in ${models//,/ }; do
    for cell in ${cells//,/ }; do
      name="$part-$model-$cell"
      seconds=$(((DEADLINE - SECONDS) / waiting))
      waiting=$((waiting - 1))
      if ((seconds < 1)); then seconds=1; fi
      # What begins too late to end is not begun: an eighth of the time is for the end.
      # shellcheck disable=SC2086
      start "$name" "$seconds" "$PYTHON" benchmarks/step.py $COMMON --budget $((seconds - seconds / 8)) \
        --models "$model" --cells "$cell" --out "$RECORDS/$name.json" "$@"
      collect
    done
  done
}

# Plugins that a machine happens to have are left out; what the tests need is named.
TESTS=(env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$PYTHON" -m pytest -p pytest_timeout -m gpu -q --tb=short --no-showlocals
  --durations=3 --maxfail=12 -o faulthandler_timeout=100 -p no:cacheprovider)
HAS_XDIST=""
if [[ -z "$TINY" ]] && "$PYTHON" -c "import xdist" > /dev/null 2>&1; then HAS_XDIST=1; fi

# queue NAME COMMAND...: starts a process of a part as soon as fewer than $JOBS run.
queue() {
  local name="$1" seconds
  shift
  while (($(jobs -pr | wc -l) >= JOBS)); do wait -n; done
  seconds=$((DEADLINE - SECONDS))
  if ((seconds < 1)); then
    skip "$name"
  else
    start "$name" "$seconds" "$@"
  fi
}

run_checks() {
  local file name split
  # Most of their time is compilation, on the host's cores; the two files of tests/gpu take longest, so they come first.
  for file in tests/gpu/test_*.py tests/kernels/test_*.py; do
    name="${file#tests/}"
    name="${name%.py}"
    split=()
    if [[ -n "$HAS_XDIST" ]]; then
      split=(-p xdist.plugin -n 2 --dist worksteal)
      if [[ "$name" == gpu/* ]]; then split=(-p xdist.plugin -n 8 --dist worksteal); fi
    fi
    queue "${name/\//-}" "${TESTS[@]}" ${split[@]+"${split[@]}"} "$file"
  done
  # shellcheck disable=SC2086
  queue identity "$PYTHON" benchmarks/identity.py $IDENTITY_ARGS --out "$RECORDS/identity.json"
  collect
}

run_sanitizer() {
  if ! command -v compute-sanitizer > /dev/null; then
    say "== sanitizer: not run, compute-sanitizer is not on this machine"
    return
  fi
  # It slows a kernel down a hundredfold: small shapes only. Torch's own cache of memory would hide what lies beyond a
  # tensor. Errors in calls of the driver are no errors of kernels, and torch makes some.
  one sanitizer env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \
    --print-limit 20 --error-exitcode 9 "${TESTS[@]}" tests/kernels \
    -k "not real and not decode and not schema and not compiles"
}

# shellcheck disable=SC2086
run_part() {
  case "$1" in
    smoke) one smoke "$PYTHON" benchmarks/smoke.py $SMALL --out "$RECORDS/smoke.json" ;;
    gemm) one gemm "$PYTHON" benchmarks/gemm_times.py $SMALL --out "$RECORDS/gemm.json" ;;
    step) time_cells step "$STEP_CELLS" qwen3-8b --methods ours/default,ours,plain,zlab,stock ;;
    checks) run_checks ;;
    widths) time_cells widths "$WIDTH_CELLS" qwen3-8b --methods none --widths "$WIDTHS" ;;
    sampled)
      time_cells sampled "$SAMPLED_CELLS" qwen3-8b \
        --methods ours/default,ours/qwen3-sampling,plain/qwen3-sampling,ours,ours/sampled,plain
      ;;
    experiments) time_cells experiments "1x$SHORT" qwen3-8b --methods none --experiments all ;;
    families) time_cells families "1x$SHORT" "$FAMILIES" --methods ours/default,ours,plain ;;
    kernels)
      one kernels "$PYTHON" benchmarks/kernel_times.py $KERNEL_ARGS --swept "$SWEPT" --out "$RECORDS/kernels.json"
      ;;
    compiled) time_cells compiled "8x$SHORT" qwen3-8b --methods plain/static,ours/default,ours ;;
    train) one train "$PYTHON" benchmarks/train_steps.py $SMALL --out "$RECORDS/train.json" ;;
    sanitizer) run_sanitizer ;;
  esac
}

for part in $PARTS; do
  if begin "$part"; then
    run_part "$part"
  else
    skip "$part"
    collect
  fi
done

failed=()
say ""
say "process, exit status (124: late, 137: late and deaf), seconds"
for name in ${NAMES[@]+"${NAMES[@]}"}; do
  read -r code seconds < "$ENDS/$name"
  # Five: no test of that file wants a GPU.
  if [[ "$code" != 0 && "$code" != 5 ]]; then failed+=("$name"); fi
  say "$(printf '%-36s %7s %5s' "$name" "$code" "$seconds")"
done
for name in ${failed[@]+"${failed[@]}"}; do
  say ""
  say "== the end of $name"
  tail -n 40 "$LOGS/$name.log" | cut -c 1-300 | tee -a "$LOG"
done
say ""
"$PYTHON" benchmarks/harness/floors_of.py "$RECORDS" 2>&1 | tee -a "$LOG"
say "$((${#NAMES[@]} - ${#failed[@]})) of ${#NAMES[@]} processes without a failure, $SECONDS s, results in $DEST"
((${#failed[@]} == 0))
