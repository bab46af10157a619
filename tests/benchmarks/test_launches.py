"""`launches.py` counts by the rule that it states, and finds what is planted into a step."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import launches
import pytest
import torch
from harness import launch_count
from harness.launch_count import CountLaunches, num_launches
from torch import Tensor

from dflash_hf import ops
from dflash_hf.cache.ragged import RaggedLayer
from dflash_hf.generation import static_step
from dflash_kernels import keep_path, top_tokens
from helpers.scripts import record_of, run_script

X = torch.ones(4, 6)
WEIGHT = torch.ones(3, 6)
WORKS: dict[str, tuple[Callable[[], Any], int]] = {
    "pointwise": (lambda: X.add(1), 1),
    "in place": (lambda: X.clone().zero_(), 2),
    "views": (
        lambda: (X.view(24), X.T, X[1:], X.expand(2, 4, 6), X.detach(), X.unflatten(1, (2, 3))),
        0,
    ),
    "memory": (lambda: (torch.empty(3), X.new_empty(2), torch.empty_like(X)), 0),
    "reshape that copies nothing": (lambda: X.reshape(6, 4), 0),
    "reshape that copies": (lambda: X.T.reshape(24), 1),
    "cast": (lambda: X.half(), 1),
    "no cast": (lambda: X.float(), 0),
    "linear": (lambda: torch.nn.functional.linear(X, WEIGHT), 1),
    "copies first": (lambda: X.masked_fill(X > 0, 1.0), 3),
    "norm": (lambda: torch.rsqrt(X.pow(2).mean(-1, keepdim=True)), 3),
    "sort": (lambda: X.sort(), 16),
    "ours": (lambda: ops.argmax(X), 2),
}


@pytest.mark.parametrize("what", WORKS)
def test_the_rule(what: str) -> None:
    work, wanted = WORKS[what]
    with torch.inference_mode(), CountLaunches(99) as count:
        work()
    assert count.num_kernels == wanted


def test_what_choosing_takes_inside_is_counted() -> None:
    logits = torch.zeros(3, 2, 9000)
    for name, kept in launch_count.CHOOSING.items():
        kernel = pytest.importorskip("triton") and importlib.import_module(
            f"dflash_kernels.{name}.kernel"
        )
        blocks = (
            [(4, kernel.LONG), (4, kernel.CHUNK)] if name == "top_tokens" else [(8, kernel.BLOCK_V)]
        )
        assert kept == blocks
        assert name != "top_tokens" or {kernel.LONG: kernel.SHORT} == launch_count.SHORT
    cases: list[tuple[Callable[[], Any], int]] = [
        # Three chunks of six rows; what is returned is on a CPU
        (lambda: ops.argmax(logits), 8 * 6 * 3),
        (lambda: top_tokens(logits[:, :, None], 15), 4 * 6 * (18 + 3)),
        (lambda: top_tokens(logits[:, :, None], 16), 4 * 6 * (71 + 3)),
    ]
    for choose, num_bytes in cases:
        with torch.inference_mode(), CountLaunches(99) as count:
            count.enter("decide")
            choose()
        assert count.choosing == num_bytes


def test_a_path_is_moved_in_as_many_launches_as_it_takes() -> None:
    kernel = pytest.importorskip("triton") and importlib.import_module(
        "dflash_kernels.keep_path.kernel"
    )
    assert launch_count.BUFFERS == kernel.MAX_BUFFERS
    given = (X, X, [X] * 72)
    assert num_launches(keep_path.op._opoverload, given) == 3


SAMPLED = ("--batch", "3", "--sample")


def run(*arguments: str) -> dict[str, Any]:
    """Runs the script's command in this process; returns its last line."""
    result = run_script(launches.main, "--tiny", "--context", "64", *arguments)
    assert result.exit_code == 0, result.output
    return record_of(result)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Steps as they are, greedy and sampled, each also as a chain; a record has grown by each."""
    out = tmp_path_factory.mktemp("launches") / "launches.json"
    chain = ("--num-tree-nodes", "0")
    found = {
        "greedy": run("--out", str(out)),
        "sampled": run(*SAMPLED, "--out", str(out)),
        "greedy chain": run(*chain, "--out", str(out)),
        "sampled chain": run(*SAMPLED, *chain, "--out", str(out)),
    }
    assert json.loads(out.read_text())["rows"] == list(found.values())
    return found


def test_one_line_says_all_of_it(rows: dict[str, dict[str, Any]]) -> None:
    for found in rows.values():
        assert found["kernels"] == sum(found["kernels_by_part"].values())
        # 6 layers of 7 products and an attention, and 2 of the draft with a kernel behind the projections.
        assert found["kernels_by_part"]["verify"] >= 6 * (7 + 2)
        assert found["kernels_by_part"]["draft"] >= 2 * (7 + 2 + 1)
        assert found["captures"] <= found["captures_32k"]
        assert found["host_reads_before_first_token"] > 0
        assert 0 < found["temporary_bytes"] < found["step_temporary_bytes"]
        assert found["bytes_read"] > 0
    decided = {name: found["kernels_by_part"]["decide"] for name, found in rows.items()}
    assert decided["sampled"] >= decided["greedy"]


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_a_tree_is_few_launches_more_than_a_chain(
    how: str, rows: dict[str, dict[str, Any]]
) -> None:
    """40 at most is what a tree by default rests on, two of them for moving the path in a target of 36 layers."""
    tree = rows[how]
    chain = rows[f"{how} chain"]
    assert chain["kernels"] < tree["kernels"] <= chain["kernels"] + 40 - 2


def test_a_step_without_kernels_is_more_launches(rows: dict[str, dict[str, Any]]) -> None:
    with ops.kernels(False):
        found = run()
    assert found["kernels"] > rows["greedy"]["kernels"]


def test_products_in_one_launch_are_four_launches_less_a_layer(
    rows: dict[str, dict[str, Any]],
) -> None:
    found = run("--num-tree-nodes", "0", "--joint-products")
    chain = rows["greedy chain"]
    # Queries, keys and values are one in place of three; so are both projections before an activation, and it.
    assert found["kernels_by_part"] == {
        "draft": chain["kernels_by_part"]["draft"] - 2 * 4,
        "verify": chain["kernels_by_part"]["verify"] - 6 * 4,
        "decide": chain["kernels_by_part"]["decide"],
    }
    assert run("--num-tree-nodes", "0")["kernels"] == chain["kernels"], "no choice is left behind"


def test_what_is_added_to_a_step_is_counted(
    rows: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, accept, write_rows = rows["greedy"], static_step.accept, RaggedLayer.write_rows
    planted = 1 << 20

    def slower(run_: Any, logits: Tensor) -> Tensor:
        torch.ones(planted, dtype=torch.uint8, device="cuda").add_(1)
        return accept(run_, logits)

    def reading(layer: RaggedLayer, *args: Any) -> None:
        layer.key_buffer.sum().item()
        write_rows(layer, *args)

    monkeypatch.setattr(static_step, "accept", slower)
    monkeypatch.setattr(launches, "_write_rows", reading)
    after = run()
    assert after["kernels"] == before["kernels"] + 2
    assert after["kernels_by_part"]["verify"] == before["kernels_by_part"]["verify"]
    assert after["temporary_bytes"] >= planted > before["temporary_bytes"]
    # The target's layers and the draft's.
    assert after["host_reads_before_first_token"] == before["host_reads_before_first_token"] + 6 + 2


def test_bad_input() -> None:
    result = run_script(launches.main, "--shape", "gpt-5")
    assert result.exit_code == 2
    assert "expected one of qwen3-4b" in result.output
