"""The rule that chooses how many tokens a step verifies, against the best fixed number, without a clock.

    make real
    .venv/bin/dflash-hf bench prepare gsm8k,humaneval,mt-bench,math500 --out build/smollm2/data
    .venv/bin/dflash-hf tune --target build/smollm2/target-bf16 --draft demos/smollm2/draft --threads 1
    .venv/bin/python benchmarks/width_simulation.py --costs ~/.cache/huggingface/dflash_hf/step_costs/X.json

The target answers the first turn of each question alone. Behind every token of the answers the tree of the draft's
guesses is searched best first by a heap (`tree_simulation.py`), and it is noted which of its nodes the answer goes
along. From this record a batch can be decoded in thought: its steps advance each row as the record says, and cost the
seconds that `dflash-hf tune` has measured for so many rows and tokens. Every rule decodes the same batches: fixed
widths, the rule by modelled costs (the default on a CPU), the rule by the measured costs, and the rule by the run's
own times (`verify_width="auto"`). The record of the answers is written beside the result and read again. Writes
`width_simulation.json`. No time is measured: other load does not matter.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from batches import SMOLLM2
from harness.machine import RESULTS, ROOT, provenance
from harness.report import finish, show, write
from tree_simulation import Levels, best_tree, levels_at_anchors

from dflash_hf.bench.sets import load_questions
from dflash_hf.generation.choice_costs import KnownCosts, StepTimes
from dflash_hf.generation.cost_table import CostTable
from dflash_hf.generation.options import first_width
from dflash_hf.generation.step_costs import StepCosts
from dflash_hf.generation.widths import FixedWidth, WidthChooser
from dflash_hf.pair.loading import load_pair
from dflash_hf.target_model.parts import find_target
from dflash_hf.training.example import Example

Chooser = WidthChooser | FixedWidth
MODELLED = "modelled costs"
MEASURED = "measured costs"
TIMED = "own times"


@dataclass(frozen=True, slots=True)
class Guess:
    """What a draft guesses behind one token of an answer, beside what the answer says.

    Args:
        path (`list[int]`): The nodes of the largest tree that the answer goes along, by depth; 1 is the likeliest.
        chain (`list[int]`): The nodes of the likeliest chain, by depth.
        num_right (`int`): Tokens of that chain that the answer has.
    """

    path: list[int]
    chain: list[int]
    num_right: int

    def nodes(self, width: int) -> list[int]:
        """Returns the nodes that are accepted of a tree of so many tokens, the anchor included."""
        return [node for node in self.path if node < width]

    def along_chain(self, width: int) -> tuple[int, int]:
        """Returns how many tokens of the chain in such a tree are accepted, and how many are tried."""
        num_there = sum(node < width for node in self.chain)
        num_accepted = min(self.num_right, num_there)
        return num_accepted, min(num_accepted + 1, num_there)


def guess_of(levels: Levels, num_nodes: int, truth: list[int]) -> Guess:
    """Returns what the best tree of so many tokens, the anchor included, has of an answer's next tokens."""
    nodes = best_tree(levels, num_nodes)
    path: list[int] = []
    ranks_of_path: tuple[int, ...] = ()
    for level, token in zip(levels, truth, strict=False):
        tokens = [guessed for _, guessed in level]
        if token not in tokens:
            break
        ranks_of_path = (*ranks_of_path, tokens.index(token))
        if ranks_of_path not in nodes:
            break
        path.append(nodes[ranks_of_path])
    chain = [nodes[key] for key in sorted(nodes, key=len) if not any(key)]
    num_right = 0
    for level, token in zip(levels, truth, strict=False):
        if level[0][1] != token:
            break
        num_right += 1
    return Guess(path, chain, num_right)


def recorded(
    target: Any, draft: Any, tokenizer: Any, texts: list[str], num_nodes: int, limit: int
) -> list[list[Guess]]:
    """Returns, for each question, what is guessed behind each token of its answer but the last."""
    parts = find_target(target)
    found: list[list[Guess]] = []
    for text in texts:
        asked = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = target.generate(**inputs, max_new_tokens=limit, do_sample=False)[0].tolist()
        first = inputs["input_ids"].shape[1]
        example = Example.from_pair(ids[:first], ids[first:])
        levels = levels_at_anchors(draft, parts, example, num_nodes)
        found.append(
            [guess_of(levels[at], num_nodes, ids[at + 1 :]) for at in sorted(levels) if at >= first]
        )
    return found


def seconds_of(chooser: Chooser, answers: list[list[Guess]], costs: CostTable) -> float:
    """Returns the seconds in which a rule decodes these answers as one batch."""
    # The first token of each answer comes from the prefill.
    places = [0] * len(answers)
    running = [row for row, answer in enumerate(answers) if answer]
    clock = 0.0
    while running:
        chooser.use_rows(len(running))
        width, is_chain = chooser.next_choice()
        guesses = [answers[row][places[row]] for row in running]
        nodes: list[list[int]] = []
        chains: list[tuple[int, int]] = []
        if is_chain:
            clock += costs.of_chain(width, len(running))
            accepted = [min(guess.num_right, width - 1) for guess in guesses]
        else:
            clock += costs.of_step(width, len(running))
            nodes = [guess.nodes(width) for guess in guesses]
            accepted = [len(one) for one in nodes]
            chains = [guess.along_chain(width) for guess in guesses]
        # A fixed width learns nothing.
        if isinstance(chooser, WidthChooser):
            chooser.learn(width, accepted, clock, nodes, chains)
        for row, num in zip(running, accepted, strict=True):
            places[row] += num + 1
        running = [row for row in running if places[row] < len(answers[row])]
    return clock


def simulated(
    answers: list[list[Guess]], rows: int, table: CostTable, modelled: StepCosts
) -> dict[str, float]:
    """Returns the seconds of every rule over all batches of so many answers."""
    widest = max(table.steps[min(table.steps)])
    firsts = range(0, len(answers) - rows + 1, rows)
    batches = [answers[first : first + rows] for first in firsts]
    # The rule by the run's own times goes on with what it has seen, the others begin anew with every call.
    times = StepTimes(widest, chain=widest)
    timed = WidthChooser(times, is_tree=True, first=first_width(widest, rows))
    totals: dict[str, float] = {}
    for batch in batches:
        rules: dict[str, Chooser] = {
            f"{width} tokens": FixedWidth(width) for width in sorted(table.steps[1])
        }
        for name, known in ((MODELLED, modelled), (MEASURED, table)):
            rules[name] = WidthChooser(KnownCosts(known, widest, chain=widest), is_tree=True)
        rules[TIMED] = timed
        timed.begin()
        for name, chooser in rules.items():
            totals[name] = totals.get(name, 0.0) + seconds_of(chooser, batch, table)
    return totals


def read_costs(file: Path) -> CostTable:
    """Returns the table that `dflash-hf tune` has written."""
    read = json.loads(file.read_text(encoding="utf-8"))
    steps = {
        int(rows): {int(width): seconds for width, seconds in by_width.items()}
        for rows, by_width in read["steps"].items()
    }
    return CostTable(steps, {int(rows): seconds for rows, seconds in read["chains"].items()})


def main(
    costs: Annotated[Path, typer.Option(help="The table that `dflash-hf tune` wrote.")],
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = SMOLLM2 / "target-bf16",
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")] = (
        ROOT / "demos" / "smollm2" / "draft"
    ),
    data: Annotated[
        Path, typer.Option(help="Folder with the test sets that `dflash-hf bench prepare` wrote.")
    ] = SMOLLM2 / "data",
    sets: Annotated[
        str, typer.Option(help="Test sets, with commas between.")
    ] = "gsm8k,humaneval,mt-bench,math500",
    rows: Annotated[str, typer.Option(help="Rows of a batch, with commas.")] = "1,2,4,8,16,32",
    questions: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    out: Annotated[Path, typer.Option(help="The result.")] = RESULTS / "width_simulation.json",
    answers: Annotated[Path, typer.Option(help="The record of the answers.")] = (
        ROOT / "build" / "width_simulation" / "answers.json"
    ),
) -> None:
    """Simulate the choice of widths on recorded answers."""
    torch.set_num_threads(1)
    table = read_costs(costs)
    model, assistant, tokenizer = load_pair(str(target), str(draft), "auto", "cpu")
    block_size = assistant.config.block_size
    modelled = StepCosts.of(find_target(model), assistant, block_size)
    widest = max(table.steps[min(table.steps)])
    known: dict[str, Any] = {}
    if answers.is_file():
        known = json.loads(answers.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = []
    for name in sets.split(","):
        key = f"{name}, {questions} questions, {max_new_tokens} tokens"
        if key not in known:
            asked = load_questions(
                str(data / f"{name}.jsonl"), data_dir=None, num_prompts=questions, seed=0
            )
            texts = [question.turns[0] for question in asked]
            guessed = recorded(model, assistant, tokenizer, texts, widest, max_new_tokens)
            known[key] = [[asdict(guess) for guess in answer] for answer in guessed]
            answers.parent.mkdir(parents=True, exist_ok=True)
            write(known, answers)
        record = [[Guess(**guess) for guess in answer] for answer in known[key]]
        for num_rows in map(int, rows.split(",")):
            seconds = simulated(record, num_rows, table, modelled)
            rules = (MODELLED, MEASURED, TIMED)
            fixed = {way: time for way, time in seconds.items() if way not in rules}
            best = min(fixed, key=lambda way: fixed[way])
            row: dict[str, Any] = {"set": name, "rows": num_rows, "best": best}
            row["one token"] = round(fixed[best] / fixed["1 tokens"], 3)
            row |= {rule: round(fixed[best] / seconds[rule], 3) for rule in rules}
            row["seconds"] = {way: round(time, 3) for way, time in seconds.items()}
            found.append(row)
    columns = [(key, key) for key in found[0] if key != "seconds"]
    show("Speed of each rule over the best fixed number of tokens", found, columns)
    facts = {
        "benchmark": "width_simulation",
        "questions": questions,
        "max_new_tokens": max_new_tokens,
        "costs": json.loads(costs.read_text(encoding="utf-8")),
        **provenance(torch.device("cpu")),
    }
    finish({"provenance": facts, "rows": found}, out, True)


if __name__ == "__main__":
    typer.run(main)
