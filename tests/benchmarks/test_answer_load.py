"""benchmarks/answer_load.py counts each prompt once, though a server is killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import answer_load
import pytest

from helpers.scripts import record_of, run_script


@pytest.mark.slow  # four starts of a server
def test_some_prompts_of_which_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_load, "WARM_UP_SECONDS", 1.0)
    words = [
        "--prompts",
        "60",
        "--at-once",
        "4",
        "--own-seconds",
        "1",
        "--out",
        tmp_path / "record.json",
    ]
    record = record_of(run_script(answer_load.main, *map(str, words)))
    assert (record["missing"], record["twice"], record["errors_of_short_prompts"]) == (0, 0, 0)
    assert record["answered"] + record["in_errors"] == 60
    assert record["in_errors"] == record["too_long"] > 0
    assert record["seconds_that_one_server_was_away"] > answer_load.DOWN_SECONDS
