"""A target that several processes hold together: what `dflash-hf train` and the trainer refuse, before any work.

That they train what one process trains is in test_ranks.py and test_command_ranks.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from dflash_hf.pair.shared_target import check_sizes
from dflash_hf.training import DFlashTrainer
from helpers.training import draws, options
from helpers.training_command import SMALL, said, train, write_rows
from tiny import tiny_draft, tiny_target

STAGES = ["--stages", "prepare,regenerate,run,export"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (STAGES, "a number of processes that --tensor-parallel-size 2 divides, got 1; start them"),
        (
            [*STAGES, "--self-prompts", "4"],
            "expected no --self-prompts with --tensor-parallel-size",
        ),
        ([*STAGES, "--device", "cpu"], "expected no --device with --tensor-parallel-size"),
        (
            [*STAGES, "--answers", "data", "--feature-server", "http://a", "--feature-cache", "f"],
            "expected no --feature-server with --tensor-parallel-size",
        ),
        ([*STAGES, "--tensor-parallel-size", "0"], "expected at least 1 as --tensor-parallel-size"),
    ],
)
def test_what_needs_a_whole_target_is_refused(
    words: list[str], sentence: str, tmp_path: Path
) -> None:
    given = [*SMALL, "--dataset", write_rows(tmp_path / "rows.jsonl"), "--tensor-parallel-size", 2]
    result = train(*given, "--output-dir", tmp_path / "run", *words)
    assert result.exit_code == 2
    assert sentence in said(result)
    assert not (tmp_path / "run").exists()


def test_a_bench_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = [*SMALL, "--dataset", write_rows(tmp_path / "rows.jsonl"), "--tensor-parallel-size", 2]
    result = train(*given, "--output-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert "expected no bench among --stages with --tensor-parallel-size" in said(result)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"vocab_size": 66}, "tokens in the vocabulary that --tensor-parallel-size 4 .* got 66"),
        ({"num_attention_heads": 6}, "attention heads that --tensor-parallel-size 4 .* got 6"),
        ({"num_key_value_heads": 2}, "key/value heads that --tensor-parallel-size 4 .* got 2"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(sizes: dict[str, int], sentence: str) -> None:
    whole = {"num_key_value_heads": 4}
    config = tiny_target("qwen3", **(whole | sizes)).config
    check_sizes(config, 1)
    with pytest.raises(ValueError, match=f"expected a number of {sentence}; give a divisor"):
        check_sizes(config, 4)
    check_sizes(tiny_target("qwen3", **whole).config, 4)


def test_a_target_of_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    """The arguments say one process, and the target is held by two: each would train on rows of its own."""
    target: Any = tiny_target("qwen3")
    assert isinstance(target, Qwen3ForCausalLM)
    draft = tiny_draft(target)
    target._device_mesh = SimpleNamespace(
        mesh_dim_names=None, get_local_rank=lambda: 0, size=lambda: 2, get_group=lambda: None
    )
    with pytest.raises(ValueError, match=r"expected tensor_parallel_size 2, .* got 1; set"):
        DFlashTrainer(model=draft, target=target, args=options(tmp_path), train_dataset=draws(3))
