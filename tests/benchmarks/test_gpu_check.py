"""`gpu_check.sh` runs every part whatever the others do, cuts what is late, and says what failed in its last lines.

A stand-in for Python plays the parts; the script itself, its limits and its signals are real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import floors_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("kernels", "gpu") for path in (ROOT / "tests" / folder).glob("test_*.py"))
TESTS = [f"{path.parent.name}-{path.stem}" for path in FILES]
STEPS = {"step", "sampled", "families", "compiled"}
TIMED = ["step", "sampled", "families", "train", "kernels", "compiled"]
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
echo done
"""

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="there is no timeout")


def run(tmp_path: Path, *arguments: str, **changes: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script with the stand-in; returns what it said and what it called."""
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("STUB_")}
    environment |= {"PYTHON": str(stub), "CALLS": str(calls), "OUT": str(tmp_path / "out"), "GRACE": "2"}
    environment |= {"STUB_FAIL": "", "STUB_HANG": "", **changes}
    done = subprocess.run(
        ["bash", "benchmarks/gpu_check.sh", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, calls.read_text().splitlines() if calls.exists() else []


def statuses(output: str) -> dict[str, int]:
    """The table of parts at the end."""
    lines = output.split("part, exit status", 1)[1].splitlines()[1:]
    rows = [line.split() for line in lines[: next(i for i, line in enumerate(lines) if not line)]]
    return {name: int(code) for name, code, _ in rows}


def test_all_parts_run(tmp_path: Path) -> None:
    done, calls = run(tmp_path, STUB_PYTEST="5")
    assert done.returncode == 0, done.stdout + done.stderr
    found = statuses(done.stdout)
    found.pop("sanitizer", None)
    assert found == {**dict.fromkeys(TESTS, 5), "identity": 0, **dict.fromkeys(TIMED, 0)}
    tested = [call.split()[-1] for call in calls if "-m pytest" in call]
    assert {str(path.relative_to(ROOT)) for path in FILES} <= set(tested)
    assert not any("--tiny" in call for call in calls)
    # The cells that decide come first, what compiles for long last, and what is timed has the machine to itself.
    steps = [i for i, call in enumerate(calls) if "benchmarks/step.py" in call]
    assert [Path(calls[i].split("--out ")[1].split()[0]).stem for i in steps] == [n for n in TIMED if n in STEPS]
    assert "--cells 1x2048,1x32768,8x2048 --methods ours,plain,zlab,stock" in calls[steps[0]]
    assert "plain/static" in calls[steps[-1]]
    checks = [i for i, call in enumerate(calls) if "-m pytest" in call or "identity.py" in call]
    others = [i for i, call in enumerate(calls) if "train_steps.py" in call or "kernel_times.py" in call]
    assert steps[0] < min(checks) <= max(checks) < steps[1] < min(others) <= max(others) < steps[-1]
    assert done.stdout.splitlines()[-1].startswith(f"{len(statuses(done.stdout))} of")


def test_a_failure_stops_nothing_and_is_shown_last(tmp_path: Path) -> None:
    done, _ = run(tmp_path, STUB_FAIL="test_graphs.py identity.py benchmarks/step.py")
    assert done.returncode == 1
    found = statuses(done.stdout)
    assert {name for name, code in found.items() if code} == {"gpu-test_graphs", "identity", *STEPS}
    assert found["kernels"] == 0
    last = done.stdout.split("part, exit status", 1)[1]
    for word in ("test_graphs.py", "identity.py", "benchmarks/step.py"):
        assert f"it said why: {word}" in last
    log = (tmp_path / "out" / "gpu_check.log").read_text()
    assert "it said why: benchmarks/step.py" in log


def test_what_is_late_is_interrupted_and_says_where_it_was(tmp_path: Path) -> None:
    done, _ = run(tmp_path, STUB_HANG="test_argmax.py step.json", T_CHECKS="2", T_STEP="2")
    assert done.returncode == 1
    found = statuses(done.stdout)
    assert {name for name, code in found.items() if code} == {"kernels-test_argmax", "step"}
    assert found["step"] == found["kernels-test_argmax"] == 124
    assert done.stdout.split("part, exit status", 1)[1].count("it was here") == 2
    assert found["kernels"] == 0


def test_without_cuda_nothing_is_begun_but_a_rehearsal(tmp_path: Path) -> None:
    done, calls = run(tmp_path, STUB_CUDA="1")
    assert done.returncode == 2
    assert "expected a CUDA device" in done.stdout
    assert len(calls) == 1
    done, calls = run(tmp_path, "--tiny", STUB_CUDA="1")
    assert done.returncode == 0
    for script in ("step.py", "kernel_times.py", "train_steps.py"):
        assert any(script in call and "--tiny" in call for call in calls)
    assert any("identity.py --random tiny" in call for call in calls)
    done, calls = run(tmp_path, "--fast")
    assert done.returncode == 2
    assert "expected --tiny" in done.stderr


def test_limits_leave_nine_minutes() -> None:
    text = (ROOT / "benchmarks" / "gpu_check.sh").read_text()
    limits = [int(limit) for limit in re.findall(r"\$\{T_[A-Z]+:-(\d+)\}", text)]
    assert len(limits) == len(TIMED) + 1
    grace = int(text.split("GRACE:-", 1)[1].split("}", 1)[0])
    assert sum(limits) + len(limits) * grace <= 9 * 60 - 10, "ten seconds for wheels and the beginning"


def test_no_more_files_than_a_lent_machine_gives_back() -> None:
    assert len([*TIMED, "identity", "gpu_check.log"]) <= 8


def test_the_short_end_names_floors_and_what_was_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine: dict[str, Any] = {"machine": {"gpu": None}}
    step = {
        "provenance": {**machine, "is_tiny": True, "is_complete": False},
        "rows": [],
        "floors": [
            {"what": "a step", "value": 1.234567, "required": "at most 1.35", "verdict": "pass"},
            {"what": "another", "value": None, "required": "at most 1.35", "verdict": "unmeasured"},
        ],
        "stages": [
            {"model": "m", "batch": 1, "context": 7, "verify_width": 16, "not_captured": "a hook", "host_reads": None}
        ],
        "not_run": [{"model": "m", "batch": 64, "context": 99, "what": "all", "why": "no room"}],
    }
    row = {"engine": "eager", "ran_on": "eager", "batch": 1, "dtype": "bfloat16", "num_texts": 4, "num_identical": 3}
    row |= {"identity_rate": 0.75, "widest_margin": 0.3, "margins_kept": False, "as_static": None}
    (tmp_path / "step.json").write_text(json.dumps(step))
    (tmp_path / "identity.json").write_text(json.dumps({"provenance": machine, "rows": [row]}))
    floors_of.main(tmp_path)
    said = capsys.readouterr().out
    assert "step: CPU, tiny, INCOMPLETE" in said
    assert "pass       a step: 1.235, at most 1.35" in said
    assert "another" not in said
    assert "m 64x99 all: no room" in said
    assert "not_captured m 1x7 width 16: a hook" in said
    assert "host_reads" not in said
    assert "kernels: no record" in said
    assert "FAIL       eager (eager), batch 1, bfloat16: 3 of 4 texts identical, widest margin 0.3" in said
