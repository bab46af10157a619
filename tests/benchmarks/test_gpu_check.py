"""`gpu_check.sh` runs the parts that are chosen, cuts what is late, and says what failed in its last lines.

A stand-in for Python plays the parts; the script itself, its limits and its signals are real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from harness import floors_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
FILES = sorted(
    path for folder in ("kernels", "gpu") for path in (ROOT / "tests" / folder).glob("test_*.py")
)
TESTS = [f"{path.parent.name}-{path.stem}" for path in FILES]
CELLS = {
    "step": ["qwen3-8b-1x2048", "qwen3-8b-1x32768", "qwen3-8b-8x2048"],
    "widths": ["qwen3-8b-1x2048", "qwen3-8b-8x2048", "qwen3-8b-32x2048"],
    "sampled": ["qwen3-8b-1x2048", "qwen3-8b-32x2048"],
    "experiments": ["qwen3-8b-1x2048"],
    "families": ["qwen3-30b-a3b-1x2048", "qwen3.5-9b-1x2048"],
    "compiled": ["qwen3-8b-8x2048"],
}
STEPS = {part: [f"{part}-{cell}" for cell in cells] for part, cells in CELLS.items()}
ALONE = ["smoke", "gemm", "kernels", "train"]
STUB = f"""#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
  *environment.py*) exit "${{STUB_CUDA:-0}}" ;;
  *floors_of.py*) exec {sys.executable} "$@" ;;
esac
for word in $STUB_FAIL; do
  if [[ "$* " == *"$word"* ]]; then echo "it said why: $word"; exit 3; fi
done
for word in $STUB_HANG; do
  if [[ "$* " == *"$word"* ]]; then
    exec {sys.executable} -c '
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("it was here", flush=True)
    raise'
  fi
done
[[ "$*" == *"-m pytest"* ]] && exit "${{STUB_PYTEST:-0}}"
all="$*"
if [[ "$all" == *"--out "* ]]; then
  path="${{all##*--out }}"
  echo '{{"provenance": {{"device": "cpu"}}, "rows": []}}' > "${{path%% *}}"
fi
if [[ -n "$STUB_LOUD" && "$*" == *"$STUB_LOUD"* ]]; then head -c 1000000 /dev/zero | tr '\\0' x; fi
echo done
"""

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="there is no timeout")


def run(
    tmp_path: Path, *arguments: str, **changes: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script with the stand-in; returns what it said and what it called."""
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("STUB_", "T_", "PARTS"))
    }
    environment |= {
        "PYTHON": str(stub),
        "CALLS": str(calls),
        "OUT": str(tmp_path / "out"),
        "GRACE": "2",
    }
    environment |= {"STUB_FAIL": "", "STUB_HANG": "", "STUB_LOUD": "", "TOTAL": "5000", **changes}
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, calls.read_text().splitlines() if calls.exists() else []


def statuses(output: str) -> dict[str, str]:
    """The table of processes at the end: name and exit status."""
    lines = output.split("process, exit status", 1)[1].splitlines()[1:]
    rows = [line.split() for line in lines[: next(i for i, line in enumerate(lines) if not line)]]
    return {name: code for name, code, _ in rows}


def packed(tmp_path: Path) -> dict[str, int]:
    """Names and sizes of the files that came back packed."""
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        return {
            member.name.removeprefix("./"): member.size for member in archive if member.isfile()
        }


def test_all_parts_run(tmp_path: Path) -> None:
    done, calls = run(tmp_path, STUB_PYTEST="5", STUB_LOUD="gemm_times.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = statuses(done.stdout)
    found.pop("sanitizer", None)
    steps = [name for names in STEPS.values() for name in names]
    assert found == {
        **dict.fromkeys(TESTS, "5"),
        "identity": "0",
        **dict.fromkeys([*ALONE, *steps], "0"),
    }
    tested = [call.split()[-1] for call in calls if "-m pytest" in call]
    assert {str(path.relative_to(ROOT)) for path in FILES} <= set(tested)
    assert not any("--tiny" in call for call in calls)
    # What says most comes first, and each cell of steps is a process of its own.
    first = [
        next(i for i, call in enumerate(calls) if word in call)
        for word in ("smoke.py", "gemm_times.py")
    ]
    timed = [i for i, call in enumerate(calls) if "benchmarks/step.py" in call]
    assert [Path(calls[i].split("--out ")[1].split()[0]).stem for i in timed] == steps
    checks = [i for i, call in enumerate(calls) if "-m pytest" in call or "identity.py" in call]
    assert first == sorted(first)
    assert first[-1] < timed[0] < timed[2] < min(checks)
    assert "--methods ours/default,ours,plain,zlab,stock" in calls[timed[0]]
    # Two files come back, in which all is.
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "gpu_check.log",
        "results.tar.gz",
    }
    files = packed(tmp_path)
    assert {f"{name}.json" for name in [*ALONE, *steps, "identity"]} <= files.keys()
    assert {f"logs/{name}.log" for name in [*ALONE, *steps, *TESTS]} <= files.keys()
    assert files["logs/gemm.log"] == 300_000


def test_parts_are_chosen_and_run_in_the_order_given(tmp_path: Path) -> None:
    done, calls = run(tmp_path, PARTS="gemm step smoke", STEP_CELLS="2x64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(statuses(done.stdout)) == ["gemm", "step-qwen3-8b-2x64", "smoke"]
    assert "--models qwen3-8b --cells 2x64" in next(call for call in calls if "step.py" in call)


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (
            (),
            {"PARTS": "step fast"},
            "expected parts among smoke gemm step .* in PARTS, got fast; choose of those",
        ),
        (
            (),
            {"PARTS": " "},
            "expected parts among .* in PARTS, got none; name some, or leave PARTS out for all",
        ),
        ((), {"TOTAL": "9m"}, "expected whole seconds in TOTAL, got 9m; leave it out for 550"),
        (("--fast",), {}, "expected --tiny, --plan or nothing, got --fast; choose parts by PARTS"),
    ],
)
def test_what_there_is_not_is_refused_before_any_work(
    tmp_path: Path, arguments: tuple[str, ...], changes: dict[str, str], message: str
) -> None:
    done, calls = run(tmp_path, *arguments, **changes)
    assert done.returncode == 2
    assert re.fullmatch(message, done.stderr.strip())
    assert not calls
    assert not (tmp_path / "out").exists()


def test_a_failure_stops_nothing_and_is_shown_last(tmp_path: Path) -> None:
    failing = "test_graphs.py identity.py benchmarks/step.py"
    done, _ = run(tmp_path, STUB_FAIL=failing, PARTS="step checks kernels")
    assert done.returncode == 1
    found = statuses(done.stdout)
    assert {name for name, code in found.items() if code != "0"} == {
        "gpu-test_graphs",
        "identity",
        *STEPS["step"],
    }
    last = done.stdout.split("process, exit status", 1)[1]
    for word in failing.split():
        assert f"it said why: {word}" in last
    assert "it said why: benchmarks/step.py" in (tmp_path / "out" / "gpu_check.log").read_text()


def test_what_is_late_is_interrupted_and_says_where_it_was(tmp_path: Path) -> None:
    done, _ = run(tmp_path, STUB_HANG="smoke.py", PARTS="smoke gemm", T_SMOKE="2", LEAST="1")
    assert done.returncode == 1
    assert statuses(done.stdout) == {"smoke": "124", "gemm": "0"}
    assert "it was here" in done.stdout.split("process, exit status", 1)[1]


def test_a_part_for_which_no_time_is_left_is_a_failure(tmp_path: Path) -> None:
    done, calls = run(tmp_path, PARTS="smoke checks", TOTAL="8")
    assert done.returncode == 1
    assert statuses(done.stdout) == {"smoke": "skipped", "checks": "skipped"}
    assert "no time was left" in done.stdout
    assert not any("smoke.py" in call or "pytest" in call for call in calls)
    assert {"logs/smoke.log", "logs/checks.log"} == packed(tmp_path).keys()


def test_without_cuda_nothing_is_begun_but_a_rehearsal(tmp_path: Path) -> None:
    done, calls = run(tmp_path, STUB_CUDA="1")
    assert done.returncode == 2
    assert "expected a CUDA device" in done.stdout
    assert len(calls) == 1
    done, calls = run(
        tmp_path, "--tiny", STUB_CUDA="1", JOBS="8", PARTS="smoke gemm step checks kernels train"
    )
    assert done.returncode == 0
    for script in ("smoke.py", "gemm_times.py", "step.py", "kernel_times.py", "train_steps.py"):
        assert any(script in call and "--tiny" in call for call in calls)
    assert any("identity.py --random tiny" in call for call in calls)


def test_the_calls_of_the_head_have_time_for_what_they_ask() -> None:
    calls = re.findall(r"^#   (TOTAL=.*)$", SCRIPT.read_text(), re.MULTILINE)
    assert len(calls) == 2
    for call, total in zip(calls, (390, 370), strict=True):
        assert call.startswith(f"TOTAL={total} ")
        done = subprocess.run(
            ["bash", "-c", f"{call} --plan"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        *parts, left = done.stdout.splitlines()
        for line in parts:
            name, seconds, _, limit = line.split()
            assert seconds == limit, name
        assert int(left.split()[1]) >= 10, "for wheels and the beginning"


def test_the_short_end_names_floors_and_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {"device": "cpu"}
    step = {
        "provenance": {**machine, "is_tiny": True, "is_complete": False},
        "rows": [],
        "floors": [
            {
                "what": "a step",
                "value": 1.234567,
                "call_value": 1.3,
                "required": "at most 1.35",
                "verdict": "pass",
            },
            {"what": "another", "value": None, "required": "at most 1.35", "verdict": "unmeasured"},
        ],
        "stages": [
            {
                "model": "m",
                "batch": 1,
                "context": 7,
                "verify_width": 16,
                "not_captured": "a hook",
                "host_reads": None,
            }
        ],
        "not_run": [{"model": "m", "batch": 64, "context": 99, "what": "all", "why": "no room"}],
    }
    row = {
        "engine": "eager",
        "ran_on": "eager",
        "batch": 1,
        "dtype": "bfloat16",
        "num_texts": 4,
        "num_identical": 3,
    }
    row |= {"identity_rate": 0.75, "widest_margin": 0.3, "margins_kept": False, "as_static": None}
    (tmp_path / "step.json").write_text(json.dumps(step))
    (tmp_path / "identity.json").write_text(json.dumps({"provenance": machine, "rows": [row]}))
    checks = [{"check": "plain", "passed": True, "why": None}]
    checks.append({"check": "eager, greedy", "passed": False, "why": "it broke"})
    products = {
        "weight": "o alone",
        "rows": 16,
        "gigabytes_per_second": 3100.0,
        "share_of_copy_bandwidth": 0.8,
    }
    (tmp_path / "smoke.json").write_text(json.dumps({"provenance": machine, "rows": checks}))
    broken = {"weight": "o alone", "way": "one launch", "rows": 32, "error": "it broke"}
    (tmp_path / "gemm.json").write_text(
        json.dumps({"provenance": machine, "rows": [{**products, "error": None}, broken]})
    )
    floors_of.main(tmp_path)
    said = capsys.readouterr().out
    assert "step: CPU, tiny, INCOMPLETE" in said
    assert "pass       a step: 1.235 (by calls 1.3), at most 1.35" in said
    assert "another" not in said
    assert "m 64x99 all: no room" in said
    assert "not_captured m 1x7 width 16: a hook" in said
    assert "host_reads" not in said
    assert "FAIL       eager, greedy: it broke" in said
    assert "plain" not in said
    assert "o alone, torch, 16 rows: 3100 GB/s, 0.8 of a copy" in said
    assert "FAIL       o alone, one launch, 32 rows: it broke" in said
    assert (
        "FAIL       eager (eager), batch 1, bfloat16: 3 of 4 texts identical, widest margin 0.3"
        in said
    )
