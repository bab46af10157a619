"""What a tree of proposals would bring a pair, without decoding: best-first search by a heap over what the draft says.

    python benchmarks/tree_simulation.py --data gsm8k,mt-bench --data-dir DIR --target T --draft D --nodes 0,8,16

The target answers the first turn of each question, greedily and alone. The draft then runs over a block behind every
token of the answers, and each answer is walked as decoding would go through it: from an anchor along the tree as far
as the answer goes, and on from there. 0 nodes are a chain over the whole block. It is a second way to the number that
`generate` has in `acceptance_length` (`--generate` prints that beside it), and shares no code of trees with it.
The last line on stdout is the record as JSON.
"""

from __future__ import annotations

import heapq
import json
import os
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from harness.machine import provenance
from harness.pair import TOY
from harness.report import show

from dflash_hf import DFlashDraftModel, load_draft
from dflash_hf.bench.sets import load_questions
from dflash_hf.generation import decode
from dflash_hf.generation.widths import FixedWidth
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.training.anchors import all_anchors
from dflash_hf.training.collators import collate
from dflash_hf.training.example import Example
from dflash_hf.training.forward import logits_of, run_blocks, target_features
from dflash_hf.training.walking import walk

# Per position, log-probabilities and tokens, the most likely first
Levels = list[list[tuple[float, int]]]


def best_tree(levels: Levels, num_nodes: int) -> dict[tuple[int, ...], int]:
    """Returns the nodes of the best tree of so many tokens, the anchor included, numbered from 1 in their order.

    A node is the rank of its path's token at each level.
    """
    # Minus the log-probability of a path, and the path
    heap: list[tuple[float, tuple[int, ...]]] = [(-levels[0][0][0], (0,))]
    nodes: dict[tuple[int, ...], int] = {}
    while heap and len(nodes) < num_nodes - 1:
        cost, ranks = heapq.heappop(heap)
        nodes[ranks] = len(nodes) + 1
        level = len(ranks) - 1
        rank = ranks[-1]
        if rank + 1 < len(levels[level]):
            worse = levels[level][rank][0] - levels[level][rank + 1][0]
            heapq.heappush(heap, (cost + worse, (*ranks[:-1], rank + 1)))
        if level + 1 < len(levels):
            heapq.heappush(heap, (cost - levels[level + 1][0][0], (*ranks, 0)))
    return nodes


def num_accepted(levels: Levels, num_nodes: int, truth: list[int]) -> int:
    """Returns how far the answer goes along the best tree of so many tokens, the anchor included."""
    if num_nodes == 0:
        for index, level in enumerate(levels):
            if index >= len(truth) or level[0][1] != truth[index]:
                return index
        return len(levels)
    nodes = {
        tuple(levels[level][rank][1] for level, rank in enumerate(ranks))
        for ranks in best_tree(levels, num_nodes)
    }
    for end in range(len(levels)):
        if tuple(truth[: end + 1]) not in nodes:
            return end
    return len(levels)


@torch.no_grad()
def levels_at_anchors(
    draft: DFlashDraftModel, target: Target, example: Example, most: int
) -> dict[int, Levels]:
    """Returns what the draft says behind every token of an answer, by the token's index."""
    config = draft.config
    size = config.block_size
    first = 1 - int(config.sample_from_anchor)
    head = logits_of(draft, target)
    batch = collate([example])
    features = target_features(
        target, config.target_layer_ids, batch, after_deepstack=config.tap_after_deepstack
    ).taps
    anchors = all_anchors(batch.loss_mask, size)
    found: dict[int, Levels] = {}
    for start in range(0, anchors.indices.shape[1], 32):
        part = anchors.select(start, start + 32)
        hidden = run_blocks(draft, target, batch, features, part)
        hidden = hidden.view(-1, size, config.hidden_size)
        log_probs = head(hidden[:, first:]).float().log_softmax(dim=-1)
        best = log_probs.topk(min(most, log_probs.shape[-1]), dim=-1)
        for row, index in enumerate(part.indices[0].tolist()):
            if not part.keep[0, row]:
                continue
            values = best.values[row].tolist()
            ids = best.indices[row].tolist()
            found[index] = [
                list(zip(*level, strict=True)) for level in zip(values, ids, strict=True)
            ]
    return found


def main(
    data: Annotated[str, typer.Option(help="Sets of `dflash-hf bench`, or files, with commas.")],
    target: Annotated[Path, typer.Option()] = TOY / "target",
    draft: Annotated[Path, typer.Option()] = TOY / "draft",
    data_dir: Annotated[Path | None, typer.Option(help="Where the sets' files are.")] = None,
    nodes: Annotated[str, typer.Option(help="Tokens of the trees; 0 is the chain.")] = "0,8,16,32",
    num_prompts: Annotated[int, typer.Option(min=1, help="Of each set.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    is_generated: Annotated[
        bool, typer.Option("--generate", help="Decode too, in float32.")
    ] = False,
) -> None:
    """Simulate trees over a pair's own answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    parts = find_target(model)
    drafter = load_draft(draft, dtype=torch.float32).eval()
    if drafter.candidate_selector is not None:
        raise typer.BadParameter(
            "expected a draft whose positions are independent, got DFlash 2; use --generate's number"
        )
    # Whole trees: what is simulated has no clock.
    decode.choose_widths = lambda generator, state, is_captured: FixedWidth(generator.verify_width)
    sizes = [int(num) for num in nodes.split(",")]
    rows: list[dict[str, Any]] = []
    for name in data.split(","):
        committed: dict[int, list[int]] = {size: [] for size in sizes}
        decoded: dict[int, list[int]] = {size: [] for size in sizes}
        for question in load_questions(name, data_dir=data_dir, num_prompts=num_prompts, seed=0):
            asked = [{"role": "user", "content": question.turns[0]}]
            inputs = tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
            text = model.generate(**inputs, **settings)[0].tolist()
            first = inputs["input_ids"].shape[1]
            example = Example.from_pair(text[:first], text[first:])
            levels = levels_at_anchors(drafter, parts, example, max(*sizes, 2))
            for size in sizes:
                accepted = [0] * len(text)
                for index, level in levels.items():
                    accepted[index] = num_accepted(level, size, text[index + 1 :])
                committed[size] += walk(accepted, first, len(text) - 1)
                if is_generated:
                    drafter.generation_config.num_tree_nodes = size
                    drafter.generation_config.max_matching_ngram_size = 0
                    model.generate(**inputs, **settings, assistant_model=drafter)
                    decoded[size] += drafter.last_stats.num_committed[0]
        for size in sizes:
            row = {
                "data": Path(name).stem,
                "nodes": size,
                "simulated": sum(committed[size]) / len(committed[size]),
            }
            if is_generated:
                row["decoded"] = sum(decoded[size]) / len(decoded[size])
            rows.append(row)
    columns = [("data", "data"), ("nodes", "nodes"), ("simulated", "simulated")]
    if is_generated:
        columns.append(("decoded", "decoded"))
    show("Tokens committed per verify", rows, columns)
    print(json.dumps({**provenance(torch.device("cpu")), "num_prompts": num_prompts, "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
