"""What two processes do that hold a target together: `torchrun --nproc-per-node 2 two_ranks.py FOLDER [CASE ...]`.

One start takes seconds, so that all cases run in one. Each is a function of [`Rank`] that raises where something is
wrong; both processes run all of them, in order, and the first prints a line of JSON per case. Targets are read from
FOLDER, as `save_targets` leaves them there; what one process says without any other, over the whole target, is the
truth.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, distributed
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel, StoppingCriteria
from transformers.distributed import DistributedConfig
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashDraftModel, iterate
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.generation.choice_costs import CHAIN
from dflash_hf.generation.widths import WidthChooser
from helpers.forked_ranks import run_ranks
from helpers.static import tensor_oracle
from helpers.vision import vision_prompts, vision_target
from tiny import MIXED, oracle_draft, prompts, tiny_draft, tiny_target, truth_of

PAIR = Path(__file__).parents[2] / "demos" / "toy"
FAMILIES = ("qwen3", "qwen3-moe", "gemma3", "qwen3-sliding", "llama", "gpt-oss")
RECURRENT = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
# Lengths of the prompts of a call, for each family: every family has rows of several lengths, one has other batches.
PROMPTS = {name: ([3, 11, 7],) for name in FAMILIES} | {name: ([4, 9],) for name in RECURRENT}
PROMPTS["qwen3"] = ([4], [3, 11, 7], [9, 2])
# Two layers: every one of them is two times to wait for the other process, in each forward.
SHALLOW: dict[str, Any] = {"num_hidden_layers": 2}
LAYERS = {name: {"layer_types": MIXED[:2]} for name in ("gemma3", "qwen3-sliding", "gpt-oss")}
LAYERS |= {name: {"layer_types": ["linear_attention", "full_attention"]} for name in RECURRENT}
NEW = 8
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.3}
RULES = ("argmax", "shared_noise", "sample")


def save_targets(folder: Path) -> None:
    """Writes the tiny targets."""
    for family in PROMPTS:
        tiny_target(family, **SHALLOW, **LAYERS.get(family, {})).save_pretrained(folder / family)
    vision_target("qwen3-vl").save_pretrained(folder / "qwen3-vl")


class Rank:
    """One of the two processes.

    Args:
        folder (`Path`): Where the targets are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[tuple[str, bool], PreTrainedModel] = {}
        self.number = int(os.environ["RANK"])

    def target(self, family: str, whole: bool = False) -> PreTrainedModel:
        """A target, this rank's share of it, or the whole."""
        if (family, whole) not in self.models:
            path = PAIR / "target" if family == "pair" else self.folder / family
            config = transformers.AutoConfig.from_pretrained(path)
            model_class = getattr(transformers, config.architectures[0])
            shares = {} if whole else {"distributed_config": DistributedConfig(tp_size=2)}
            model = model_class.from_pretrained(path, **shares).eval()
            if getattr(config.get_text_config(), "num_experts_per_tok", None):
                model.set_experts_implementation("eager")
            self.models[family, whole] = model
        return self.models[family, whole]

    def seed(self, number: int) -> None:
        """Gives the ranks random states of their own; what one process says alone begins with the first one's."""
        torch.manual_seed(number + 1000 * self.number)

    def same(self, value: Any) -> Any:
        """Returns a value that all ranks must have."""
        found: list[Any] = [None, None]
        distributed.all_gather_object(found, value)
        assert found[0] == found[1], f"rank 0 has {found[0]}, rank 1 {found[1]}"
        return value

    def check(self, text: Tensor, truth: Tensor) -> None:
        """A text is the true one, on both ranks."""
        self.same(text.tolist())
        assert text.tolist() == truth.tolist(), f"expected {truth.tolist()}, got {text.tolist()}"

    def refused(
        self, expected: dict[int, tuple[type[BaseException], str]], call: Callable[[], object]
    ) -> None:
        """Every rank ends with its own error, and none waits for the other."""
        kind, match = expected[self.number]
        with pytest.raises(kind, match=match):
            call()
        self.same("went on")


def greedy(rank: Rank) -> int:
    """Plain `generate`'s text, with oracles that are right for other parts of a block on each rank."""
    cases = 0
    for family, all_lengths in PROMPTS.items():
        shared, whole = rank.target(family), rank.target(family, whole=True)
        for seed, lengths in enumerate(all_lengths):
            inputs = prompts(lengths, seed)
            ref = whole.generate(**inputs, **GREEDY, eos_token_id=5)
            draft = oracle_draft(
                shared, truth_of(inputs, ref), seed, raw_input_embeddings=family == "gemma3"
            )
            draft.random.manual_seed(seed + 1000 * rank.number)
            rank.seed(seed)
            rank.check(
                shared.generate(**inputs, **GREEDY, eos_token_id=5, assistant_model=draft), ref
            )
            assert draft.last_stats is not None
            rank.same(draft.last_stats.num_committed)
            assert draft.last_stats.acceptance_length > 1.2
            if family not in RECURRENT:
                draft.generation_config.num_tree_nodes, draft.strength = 12, 4.0
                rank.check(
                    shared.generate(**inputs, **GREEDY, eos_token_id=5, assistant_model=draft), ref
                )
                rank.same(draft.last_stats.num_accepted_by_node)
            cases += 1
    return cases


def greedy_pair(rank: Rank) -> int:
    """The bundled pair: plain `generate`'s own text over the two shares."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target, draft = rank.target("pair"), DFlashDraftModel.from_pretrained(PAIR / "draft")
    lines = (PAIR / "held_out.jsonl").read_text().splitlines()[:2]
    for line in lines:
        message = json.loads(line)["messages"][:1]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ref = target.generate(**inputs, **GREEDY)
        rank.check(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats is not None
        assert draft.last_stats.acceptance_length > 1.5
    return len(lines)


def shared_noise(rank: Rank) -> int:
    """The text of the target alone, drawn with the first rank's noise."""
    cases = 0
    for family, all_lengths in PROMPTS.items():
        shared, whole = rank.target(family), rank.target(family, whole=True)
        for seed, lengths in enumerate(all_lengths[:2]):
            inputs, alone = prompts(lengths, seed), tiny_draft(whole)
            alone.generation_config.verify_width = 1
            torch.manual_seed(seed)
            ref = whole.generate(**inputs, **SAMPLED, assistant_model=alone)
            draft = oracle_draft(shared, truth_of(inputs, ref), seed)
            draft.random.manual_seed(seed + 1000 * rank.number)
            draft.generation_config.proposal = "shared_noise"
            rank.seed(seed)
            rank.check(shared.generate(**inputs, **SAMPLED, assistant_model=draft), ref)
            cases += 1
    return cases


def rules(rank: Rank) -> int:
    """Every proposal rule, greedy parts of the settings changed too: what one process says alone."""
    shared, whole = rank.target("qwen3"), rank.target("qwen3", whole=True)
    settings: tuple[dict[str, Any], ...] = (
        {"max_new_tokens": 6},
        {"top_k": 5, "top_p": 0.9, "max_new_tokens": 6},
        {"eos_token_id": 7, "max_new_tokens": 6},
        {"top_k": 9, "max_new_tokens": 6},
    )
    inputs = prompts([4, 9, 6], 3)
    for rule in RULES:
        for number, setting in enumerate(settings):
            texts: list[Tensor] = []
            for target in (whole, shared):
                draft = tiny_draft(target)
                draft.generation_config.proposal = rule
                is_tree = number == 3 and rule != "sample"  # which refuses trees
                draft.generation_config.num_tree_nodes = 9 if is_tree else 0
                torch.manual_seed(number) if target is whole else rank.seed(number)
                texts.append(
                    target.generate(**inputs, **{**SAMPLED, **setting}, assistant_model=draft)
                )
            rank.check(texts[1], texts[0])
    return len(RULES) * len(settings)


def widths(rank: Rank) -> int:
    """`verify_width="auto"` is the first rank's choice, which follows from its clock."""
    shared = rank.target("qwen3")
    inputs = prompts([4, 9], 3)
    ref = rank.target("qwen3", whole=True).generate(**inputs, **GREEDY)
    draft = tensor_oracle(shared, truth_of(inputs, ref), 1, 16)
    draft.generation_config.verify_width = "auto"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WidthChooser, "next_choice", lambda chooser: ((8, 4)[rank.number], False))
        rank.check(shared.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats is not None
    assert set(draft.last_stats.verify_widths) == {8}
    # So is whether a step verifies a tree: the first one's are chains.
    draft.generation_config.verify_width, draft.generation_config.num_tree_nodes = None, "auto"

    def next_choice(chooser: WidthChooser) -> tuple[int, bool]:
        chooser.current = (CHAIN, 8)[rank.number]
        return chooser.current or chooser.chain, chooser.current == CHAIN

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WidthChooser, "next_choice", next_choice)
        rank.check(shared.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert set(draft.last_stats.verify_widths) == {16}
    assert not draft.last_stats.num_tried_by_node
    return 2


def clocks(rank: Rank) -> int:
    """Ranks that see another time: to the first one a draft is all but free, to the second one fifty times as dear."""
    shared, settings = rank.target("qwen3"), {**GREEDY, "max_new_tokens": 60}
    inputs, learn = prompts([4, 9], 3), WidthChooser.learn
    ref = rank.target("qwen3", whole=True).generate(**inputs, **settings)
    for setting in ("auto", None):
        draft = tensor_oracle(shared, truth_of(inputs, ref), 1, 16)
        draft.generation_config.verify_width = setting
        seconds, mine = 0.0, list[int]()

        def observed(
            chooser: WidthChooser, width: int, accepted: Sequence[int], clock: float, *trees: Any
        ) -> None:
            nonlocal seconds
            seconds += 1.0 if width == 1 else (1.1, 50.0)[rank.number]
            mine.append(chooser.current or chooser.chain or 1)  # noqa: B023
            learn(chooser, width, accepted, seconds, *trees)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WidthChooser, "learn", observed)
            rank.check(shared.generate(**inputs, **settings, assistant_model=draft), ref)
        assert draft.last_stats is not None
        taken = rank.same(draft.last_stats.verify_widths)
        found: list[list[int]] = [[], []]
        distributed.all_gather_object(found, mine)
        assert taken == found[0], "the first rank's own"
        # By its own clock the second rank had chosen otherwise. Where nothing is said, no clock chooses.
        assert (taken != found[1]) == (setting == "auto")
    return 2


class Streamer(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        """Takes tokens."""
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        """Nothing."""


class Once(StoppingCriteria):
    """Does something at its `at`-th call; stops nothing."""

    def __init__(self, at: int, action: Callable[[], object]) -> None:
        self.left, self.action = at, action

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Counts."""
        self.left -= 1
        if not self.left:
            self.action()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def callers(rank: Rank) -> int:
    """Stop strings, a streamer on one rank only, noise in one rank's scores, a clock, scores, `iterate`."""
    shared, whole = rank.target("qwen3"), rank.target("qwen3", whole=True)
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    cases = 0
    for lengths in ([6], [4, 9, 6]):
        inputs = prompts(lengths, 3)
        plain = whole.generate(**inputs, **GREEDY)
        draft = tensor_oracle(shared, truth_of(inputs, plain), 1)
        end = int(inputs["input_ids"].shape[1])
        stop = {
            "stop_strings": [tokenizer.decode([int(plain[0, end + 5])])],
            "tokenizer": tokenizer,
        }
        more: dict[str, Any] = {"eos_token_id": 1, "pad_token_id": 0}
        ref = whole.generate(**inputs, **GREEDY, **stop, **more)
        rank.check(shared.generate(**inputs, **GREEDY, **stop, **more, assistant_model=draft), ref)

        streamer = Streamer() if rank.number == 0 else None
        batch = {"num_beams": 1}
        rank.check(
            shared.generate(**inputs, **GREEDY, **batch, streamer=streamer, assistant_model=draft),
            plain,
        )
        if streamer is not None:
            assert [token for part in streamer.got[1:] for token in part] == plain[
                :, end:
            ].T.flatten().tolist()

        streamer = Streamer()
        rank.seed(5)
        text = shared.generate(**inputs, **SAMPLED, streamer=streamer, assistant_model=draft)
        assert [token for part in streamer.got[1:] for token in part] == text[
            :, end:
        ].T.flatten().tolist()
        rank.same(text.tolist())

        def noisy(ids: Any, scores: Tensor) -> Tensor:
            return scores + 9 * torch.randn_like(scores) if rank.number else scores

        rank.check(
            shared.generate(**inputs, **GREEDY, logits_processor=[noisy], assistant_model=draft),
            plain,
        )

        late = [Once(3, lambda: None)]
        out = shared.generate(
            **inputs,
            **GREEDY,
            stopping_criteria=late if rank.number else None,
            return_dict_in_generate=True,
            output_scores=True,
            assistant_model=draft,
        )
        rank.check(out.sequences, plain)
        assert len(out.scores) == NEW

        steps = [step.committed for step in iterate(shared, draft, **inputs, **GREEDY)]
        for row in range(len(lengths)):
            rank.check(torch.cat([step[row] for step in steps]), plain[row, end:])
        cases += 6
    text = shared.generate(
        **inputs, max_new_tokens=400, do_sample=False, max_time=0.2, assistant_model=draft
    )
    rank.same(text.tolist())
    return cases + 1


def images(rank: Rank) -> int:
    """A vision target, rows with several images and none."""
    shared, whole = rank.target("qwen3-vl"), rank.target("qwen3-vl", whole=True)
    inputs = vision_prompts(whole, "qwen3-vl", [[(4, 4)], [(2, 4), (4, 2)], []], 1)
    ref = whole.generate(**inputs, **GREEDY)
    draft = oracle_draft(shared, truth_of(inputs, ref), 1)
    rank.check(shared.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    return 1


def kept_caches(rank: Rank) -> int:
    """Two turns with a cache of the user's, of targets with attention alone and with recurrent layers."""
    settings = {**GREEDY, "max_new_tokens": 8}
    for family in ("qwen3", "gemma3", "qwen3.5"):
        texts: list[Tensor] = []
        for whole in (True, False):
            target = rank.target(family, whole)
            draft = tiny_draft(target)
            cache = DynamicCache(config=target.config)
            given = prompts([4, 9], 3)
            for typed in (5, 0):
                extra = {} if whole else {"assistant_model": draft}
                text = target.generate(
                    **given, **settings, eos_token_id=5, **{CACHE_NAME: cache}, **extra
                )
                texts.append(text)
                new = prompts([typed, typed], 8)["input_ids"] if typed else text[:, :0]
                ids = torch.cat([text, new], dim=1)
                mask = torch.ones_like(ids)
                mask[:, : given["attention_mask"].shape[1]] = given["attention_mask"]
                given = {"input_ids": ids, "attention_mask": mask}
        for ref, text in zip(texts[:2], texts[2:], strict=True):
            rank.check(text, ref)
    return 3


def other_calls(rank: Rank) -> int:
    """Ranks that were given different things, or one something that is refused: nobody waits, nothing has happened."""
    target = rank.target("qwen3")
    draft, odd = tiny_draft(target), rank.number == 1
    inputs = prompts([4, 9], 3)
    state = torch.random.get_rng_state()

    def call(**changes: Any) -> Callable[[], object]:
        return lambda: target.generate(
            **{**inputs, **GREEDY, "assistant_model": draft, **(changes if odd else {})}
        )

    both = (
        ValueError,
        "expected every rank to make the same call, got another {} on rank 1 than on rank 0; give",
    )
    for name, changes in {
        "input_ids": {"input_ids": inputs["input_ids"] + 1},
        "attention_mask, input_ids, position_ids": prompts([4, 9, 3], 3),
        "attention_mask, position_ids": {
            "attention_mask": torch.ones_like(inputs["attention_mask"])
        },
        "max_length, max_new_tokens": {"max_new_tokens": 5},
        "do_sample": {"do_sample": True},
        CACHE_NAME: {CACHE_NAME: DynamicCache(config=target.config)},
    }.items():
        expected = both[0], both[1].format(name)
        rank.refused({0: expected, 1: expected}, call(**changes))
    drafts_trees = tiny_draft(target)
    drafts_trees.generation_config.num_tree_nodes = 0 if odd else None
    expected = both[0], both[1].format("is_tree")
    settings: dict[str, Any] = {**inputs, **GREEDY, "assistant_model": drafts_trees}
    rank.refused({0: expected, 1: expected}, lambda: target.generate(**settings))
    told = RuntimeError, "expected all 2 ranks of the target to go on, got an error on rank 1"
    for match, changes in {
        "num_beams": {"num_beams": 2},
        "at least one token": {"input_ids": inputs["input_ids"][:, :0]},
        "custom_generate": {"custom_generate": print},
        "stop_strings": {"stop_strings": ["x"]},
    }.items():
        rank.refused({0: told, 1: (ValueError, match)}, call(**changes))
    assert torch.equal(state, torch.random.get_rng_state())
    ref = rank.target("qwen3", whole=True).generate(**inputs, **GREEDY)
    rank.check(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    return 11


class Broken(Exception):
    """What a caller's own code raises."""


def _raise() -> None:
    raise Broken("of the caller's own")


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def failures(rank: Rank) -> int:
    """One rank fails or is interrupted on the way: all end, the user's cache is as it was, and the next call right."""
    target, whole = rank.target("qwen3"), rank.target("qwen3", whole=True)
    inputs = prompts([4, 9], 3)
    ref = whole.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 1)
    cases, hook = 0, None

    class Failing(Streamer):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.got) == 4:
                _raise()

    for failing in (0, 1):
        told = RuntimeError, f"got an error on rank {failing}"
        for name, action in {
            "criterion": _raise,
            "streamer": _raise,
            "interrupt": _interrupt,
            "interrupt in a forward": _interrupt,
        }.items():
            cache = DynamicCache(config=target.config)
            target.generate(
                **prompts([3, 2], 5), **GREEDY, **{CACHE_NAME: cache}, assistant_model=draft
            )
            before = cache.get_seq_length(), cache.layers[0].keys.clone()
            ids = torch.cat(
                [torch.zeros(2, before[0] - 3 - 1, dtype=torch.long) + 4, inputs["input_ids"]],
                dim=1,
            )
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_NAME: cache}
            extra: dict[str, Any] = {**GREEDY, "max_new_tokens": 60, "assistant_model": draft}
            if rank.number == failing and name == "streamer":
                extra["streamer"] = Failing()
            elif rank.number == failing and name != "interrupt in a forward":
                extra["stopping_criteria"] = [Once(4, action)]
            elif rank.number == failing:
                calls = iter(range(9))
                layer = target.model.layers[1]
                hook = layer.register_forward_hook(
                    lambda *args, calls=calls: _interrupt() if next(calls, 0) == 4 else None
                )
            call = functools.partial(target.generate, **given, **extra)
            if action is _raise:
                rank.refused({failing: (Broken, "own"), 1 - failing: told}, call)
            else:
                rank.refused({0: (KeyboardInterrupt, "^$"), 1: (KeyboardInterrupt, "^$")}, call)
            if hook is not None:
                hook.remove()
                hook = None
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert cache.get_seq_length() == before[0]
            assert torch.equal(cache.layers[0].keys, before[1])
            rank.check(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
            cases += 1
    return cases


def fails_in_a_forward(rank: Rank) -> int:
    """An error that cannot be told: this process has to end, and the other one with it. The last case of a start."""
    target = rank.target("qwen3")
    if rank.number == 1:
        target.model.layers[1].mlp.register_forward_pre_hook(lambda *args: _raise())
    target.generate(**prompts([4], 3), **GREEDY, assistant_model=tiny_draft(target))
    return 0


CASES = (
    greedy,
    greedy_pair,
    shared_noise,
    rules,
    widths,
    clocks,
    callers,
    images,
    kept_caches,
    other_calls,
    failures,
)


def main(folder: Path, names: list[str]) -> None:
    """Runs the cases of these names, or all; one that ends the process comes last."""
    torch.set_num_threads(1)
    rank = Rank(folder)
    rank.target("qwen3")
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        started, found = time.perf_counter(), list[Any]([0, ""])
        try:
            found[0] = case(rank)
        except Exception:  # a failed case is reported like a passed one
            found[1] = traceback.format_exc()
        both: list[Any] = [None, None]
        distributed.all_gather_object(both, found)
        if rank.number == 0:
            line = {"checked": both[0][0], "errors": [error for _, error in both if error]}
            print(
                json.dumps(
                    {"case": case.__name__, "seconds": time.perf_counter() - started, **line}
                ),
                flush=True,
            )
    if not names or fails_in_a_forward.__name__ in names:
        fails_in_a_forward(rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_ranks(lambda: main(Path(sys.argv[1]), sys.argv[2:]))
