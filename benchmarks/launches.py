"""How many kernels one step launches at a published shape, and what else shows without a GPU.

The step that a CUDA graph would hold runs under torch's `FakeTensorMode` on a pretended H200: shapes, no numbers, no
memory. Its operations are counted by the rule in harness/launch_count.py, an upper count that is the same before and
after a change. No time follows from it.

    python benchmarks/launches.py --shape qwen3-8b --batch 1 --context 2048 --num-tree-nodes 0
    python benchmarks/launches.py --shape qwen3-8b --batch 32 --context 2048 --top-k 20 --top-p 0.95
    python benchmarks/launches.py --shape qwen3-8b --num-tree-nodes 0 --joint-products

Prints a table per operation; the last line is a JSON object:

* `kernels`: launches of one step: `kernels_by_part` of draft, verify and deciding;
* `bytes_read`: what a step has to read (harness/roofline.py), with the draft's weights as they are;
* `temporary_bytes`: the most memory at once while tokens are chosen, draft's or target's, beyond what there is when
  the logits have been made; `step_temporary_bytes`: of the whole step;
* `host_reads_before_first_token`: reads of a tensor of the device's, for one unpadded prompt with its mask;
* `captures`, `captures_32k`: graphs of one width for a prompt of 500 tokens and 2,048 or 32,768 new ones.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import typer
from harness.launch_count import CountLaunches
from harness.machine import provenance
from harness.pair import Pair
from harness.report import Column, show, write
from harness.roofline import step_work
from harness.shapes import SHAPES, Shape, draft_config, shape_of, target_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash_hf import joint_products
from dflash_hf.cache.ragged import RaggedLayer
from dflash_hf.generation import cuda_graph, prefill, product_times, static_step
from dflash_hf.generation.cuda_graph import Captured, GraphStep
from dflash_hf.generation.host_reads import reads_on_host
from dflash_hf.generation.run import Run
from dflash_hf.generation.static_step import StaticStep
from helpers import pretended_gpu as pretended

TEMPERATURE = 0.7
PROMPT = 500
NEW = 2048
NEW_LONG = 32768
PARTS = ("draft", "verify", "decide")
COLUMNS: list[Column] = [(name, name) for name in ("operation", "calls", "kernels", *PARTS)]
# What the pretended GPU leaves out, and is counted here.
_write_rows = RaggedLayer.write_rows
_commit_first = prefill._commit_first


@contextmanager
def parts_of(count: CountLaunches) -> Generator[None]:
    """Tells the counter which part of a step runs."""

    def named(part: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            count.enter(part)
            return function(*args, **kwargs)

        return run

    with (
        mock.patch.object(static_step, "draft", named("draft", static_step.draft)),
        mock.patch.object(static_step, "verify", named("verify", static_step.verify)),
        mock.patch.object(static_step, "accept", named("decide", static_step.accept)),
    ):
        yield


def count_step(run: Run, vocab_size: int) -> CountLaunches:
    """Counts the step that would be captured, after one that makes what is kept, such as views."""
    static = StaticStep(run)
    count = CountLaunches(vocab_size)
    with torch.inference_mode(), parts_of(count):
        static.body(static.bound(1))
        with count:
            static.body(static.bound(1))
    return count


def host_reads(target: Any, draft: Any, prompt: int) -> int:
    """Returns how often a prefill reads a tensor of the device's, from its beginning to the first token's commit."""
    num = 0
    numbers = WeakIdKeyDictionary()

    class Counted(pretended.Answers):
        """Answers, and counts the questions; what is on the host is computed, and the mask is all ones there."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal num
            given = tensors_of((args, kwargs))
            if func.namespace != "prim" and any(tensor.is_cuda for tensor in given):
                num += reads_on_host(func, args, kwargs or {})
            outs = None
            stays = torch.device((kwargs or {}).get("device") or "cpu").type == "cpu"
            if stays and all(tensor in numbers for tensor in given):
                real = tree_map(
                    lambda leaf: numbers[leaf] if isinstance(leaf, torch.Tensor) else leaf,
                    (args, kwargs),
                )
                with _disable_current_modes():
                    outs = func(*real[0], **(real[1] or {}))
            if func is torch.ops.aten._local_scalar_dense.default and outs is not None:
                return outs
            out = super().__torch_dispatch__(func, types, args, kwargs)
            made = tensors_of(out)
            if all(tensor.is_cpu for tensor in made):
                with _disable_current_modes():
                    ones = [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in made]
                numbers.update(zip(made, ones if outs is None else tensors_of(outs), strict=True))
            return out

    def tolist(tensor: torch.Tensor) -> Any:
        """At once, where a tensor without numbers asks for each."""
        nonlocal num
        num += tensor.is_cuda
        return _nested(tuple(tensor.shape), prompt - 1)

    mask = torch.ones(1, prompt, dtype=torch.long, device="cuda")
    with (
        mock.patch.object(pretended, "Answers", Counted),
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch.object(RaggedLayer, "write_rows", _write_rows),
        mock.patch.object(prefill, "_commit_first", _commit_first),
    ):
        pretended.begin(target, draft, prompt=prompt, inputs={"attention_mask": mask})
    return num


def tensors_of(values: Any) -> list[torch.Tensor]:
    """All tensors in what an operation is given or returns."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _nested(shape: tuple[int, ...], value: int) -> Any:
    if not shape:
        return value
    return [_nested(shape[1:], value) for _ in range(shape[0])]


@contextmanager
def products_of(are_joint: bool, *models: Any) -> Generator[None]:
    """Multiplies as if products in one launch had been measured to be faster, or as without a measurement."""
    with (
        mock.patch.object(joint_products, "_chosen", set[Any]()),
        mock.patch.object(product_times, "_seconds", side_effect=itertools.cycle((2.0, 1.0))),
    ):
        if are_joint:
            product_times.measure_products(*models)
        yield


def num_captures(run: Run) -> int:
    """Returns how many graphs would be captured before a run's first step."""
    bounds: list[int] = []

    def capture_one(self: GraphStep, bound: int) -> Captured:
        bounds.append(bound)
        return Captured(None, None, None, None)

    with (
        mock.patch.object(cuda_graph, "fingerprint_of", return_value=0),
        mock.patch.object(GraphStep, "capture_one", capture_one),
    ):
        GraphStep(run).capture()
    return len(bounds)


def measure(
    shape: Shape,
    batch: int,
    context: int,
    warpers: list[Any],
    num_tree_nodes: int | None = None,
    draft_dtype: Any = None,
    are_joint: bool = False,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Counts everything of one case; returns what the last line holds, and the rows of the table."""
    is_sampled = bool(warpers)
    with pretended.pretended_gpu():
        target = pretended.build_target(target_config(shape))
        draft = pretended.build_draft(draft_config(shape))
        draft.generation_config.num_tree_nodes = num_tree_nodes
        draft.generation_config.draft_dtype = draft_dtype
        if shape.experts:
            target.set_experts_implementation("grouped_mm")

        def begin(rows: int, prompt: int, new: int) -> Run:
            return pretended.begin(target, draft, rows, warpers, is_sampled, prompt, new)

        run = begin(batch, context, NEW)
        with products_of(are_joint, target, draft):
            counted = count_step(run, shape.vocab)
        pair = Pair(target=target, draft=draft, name="")
        found = {
            "kernels": counted.num_kernels,
            "kernels_by_part": {
                part: sum(n for (p, _), n in counted.kernels.items() if p == part) for part in PARTS
            },
            "bytes_read": round(
                step_work(pair, batch * context, batch, run.generator.verify_width).bytes
            ),
            "temporary_bytes": counted.choosing,
            "step_temporary_bytes": counted.peak,
            "host_reads_before_first_token": host_reads(target, draft, PROMPT),
            "captures": num_captures(begin(1, PROMPT, NEW)),
            "captures_32k": num_captures(begin(1, PROMPT, NEW_LONG)),
        }
    return found, counted.rows()


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen3-8b",
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of context per row.")] = 2048,
    sample: Annotated[
        bool, typer.Option("--sample", help=f"Sample at temperature {TEMPERATURE}.")
    ] = False,
    top_k: Annotated[int | None, typer.Option(help="Sample among the best so many tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="And among those that make up so much of them.")
    ] = None,
    num_tree_nodes: Annotated[
        int | None, typer.Option(help="Verify a tree of so many tokens; 0 is a chain.")
    ] = None,
    draft_dtype: Annotated[str | None, typer.Option(help="float8_e4m3fn: draft in FP8.")] = None,
    are_joint: Annotated[
        bool,
        typer.Option("--joint-products", help="As if products in one launch had been faster."),
    ] = False,
    is_tiny: Annotated[
        bool, typer.Option("--tiny", help="A double with all sizes small: to try the script.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A record to add the case to.")] = None,
) -> None:
    """Counts the launches of one step."""
    if shape not in SHAPES:
        raise typer.BadParameter(
            f"expected one of {', '.join(SHAPES)}, got {shape}; name one of them"
        )
    warpers: list[Any] = []
    if sample or top_k or top_p:
        warpers.append(TemperatureLogitsWarper(TEMPERATURE))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p:
        warpers.append(TopPLogitsWarper(top_p))
    sizes = shape_of(shape, is_tiny)
    found, rows = measure(sizes, batch, context, warpers, num_tree_nodes, draft_dtype, are_joint)
    case = {
        "shape": shape,
        "is_tiny": is_tiny,
        "batch": batch,
        "context": context,
        "sample": bool(warpers),
    }
    record = {
        **case,
        "top_k": top_k,
        "top_p": top_p,
        "num_tree_nodes": num_tree_nodes,
        "draft_dtype": draft_dtype,
        "joint_products": are_joint,
        **found,
        "provenance": provenance(torch.device("cpu")),
    }
    show(
        f"launches of one step: {shape}, batch {batch}, context {context}, an upper count",
        rows,
        COLUMNS,
    )
    if out is not None:
        before: list[Any] = []
        if out.exists():
            before = json.loads(out.read_text(encoding="utf-8"))["rows"]
        write({"rows": [*before, record]}, out)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    typer.run(main)
