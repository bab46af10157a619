"""What makes a call fast is on in ordinary situations, as in the first call of a new pair; no text shows it.

Of each step it is noted: inference mode, the whole run, the layers that ran as one function, and copied weights.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashDraftModel, RunningBatch, packed_weights
from dflash_hf.generation import decode, running_batch
from dflash_hf.generation.run import Run
from dflash_hf.target_model import user_code
from dflash_hf.target_model.fast_layers import Plan, in_whole_run
from dflash_hf.target_model.fast_on_cpu import FastLayer
from helpers.vision import shallow_vision_target, vision_prompts
from tiny import prompts, shallow_target, tiny_draft

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
ROWS = prompts([9, 5], 0)
ROW = prompts([9], 0)
LAYERS = 2  # of a shallow target


class Words:
    """What a streamer of Transformers' needs of a tokenizer."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Switches(NamedTuple):
    """What was on in a step."""

    is_inference: bool
    is_whole_run: bool  # nothing of the user's uses the target, from the prefill on
    num_fast_layers: int  # that ran as one function
    has_copies: bool  # whether weights were multiplied in oneDNN's layout


ON = Switches(is_inference=True, is_whole_run=True, num_fast_layers=LAYERS, has_copies=True)


class Seen:
    """What the calls of a test had on, of all threads."""

    def __init__(self) -> None:
        self.steps = set[Switches]()
        self.num_fast_layers = 0  # that ran as one function until now, in prefills too
        self.num_products = 0  # over copies until now
        self.num_plans = 0  # looks for fast forms

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has every step, fast layer and product be noted."""
        answer: Callable[..., Any] = FastLayer.answer
        product: Callable[..., Tensor] = packed_weights._product
        prepare_plan: Callable[..., None] = Plan.__init__

        def noted_answer(*args: Any) -> Any:
            out = answer(*args)
            self.num_fast_layers += out is not None
            return out

        def noted_product(*args: Any) -> Tensor:
            self.num_products += 1
            return product(*args)

        def noted_plan(*args: Any) -> None:
            self.num_plans += 1
            prepare_plan(*args)

        monkeypatch.setattr(FastLayer, "answer", noted_answer)
        monkeypatch.setattr(packed_weights, "_product", noted_product)
        monkeypatch.setattr(Plan, "__init__", noted_plan)
        for module in (decode, running_batch):
            monkeypatch.setattr(module, "step", self._noted(module.step))

    def _noted(self, step: Callable[[Run], Any]) -> Callable[[Run], Any]:
        def noted(run: Run) -> Any:
            num_layers = self.num_fast_layers
            num_products = self.num_products
            is_inference = torch.is_inference_mode_enabled()
            is_whole_run = in_whole_run(run.request.target)
            out = step(run)
            switches = Switches(
                is_inference,
                is_whole_run,
                self.num_fast_layers - num_layers,
                self.num_products > num_products,
            )
            self.steps.add(switches)
            return out

        return noted


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Watches steps, in which the weights of tiny models are copied too."""
    packed_weights.forget_packed()
    monkeypatch.setattr(packed_weights, "MIN_SIZES", dict.fromkeys(packed_weights.MIN_SIZES, 1))
    found = Seen()
    found.watch(monkeypatch)
    return found


def pair_of(family: str = "qwen3", **overrides: Any) -> tuple[Any, DFlashDraftModel]:
    """Returns a new pair, whose verifies are wide enough for copies."""
    target = shallow_target(family, **overrides).float()
    draft = tiny_draft(target)
    draft.generation_config.verify_width = 4
    return target, draft


def steps_of(
    seen: Seen, target: Any, draft: DFlashDraftModel, rows: Any = ROWS, **given: Any
) -> set[Switches]:
    """Returns what the steps of a call had on; in its prefill too the layers ran as one function."""
    seen.steps.clear()
    before = seen.num_fast_layers
    target.generate(**rows, **{**GREEDY, **given}, assistant_model=draft)
    num_verifies = draft.last_stats.num_target_forwards - 1
    assert seen.num_fast_layers - before >= LAYERS * (num_verifies + 1)
    return seen.steps.copy()


def record(target: Any) -> None:
    target(**ROWS, output_hidden_states=True)


def show_attentions(target: Any) -> None:
    target.set_attn_implementation("eager")
    target(**ROWS, output_attentions=True)
    target.set_attn_implementation("sdpa")


def train(target: Any) -> None:
    target.train()
    target(**ROWS, labels=ROWS["input_ids"]).loss.backward()
    target.eval()


def train_from_the_embedding(target: Any) -> None:
    # Transformers does so for adapters and for checkpoints, by a hook that stays.
    target.enable_input_require_grads()
    train(target)


def freeze(target: Any) -> None:
    target.requires_grad_(False)


def generate_plainly(target: Any) -> None:
    target.generate(**ROWS, **GREEDY)


def look_up_prompts(target: Any) -> None:
    target.generate(**ROW, **GREEDY, prompt_lookup_num_tokens=3)


def draft_by_a_model(target: Any) -> None:
    target.generate(**ROW, **GREEDY, assistant_model=shallow_target("qwen3", seed=3).float())


def draft_by_transformers(target: Any) -> None:
    draft = tiny_draft(target)
    target.generate(**ROW, **GREEDY, speculation_type="dflash", assistant_model=draft)


def draft(target: Any) -> None:
    target.generate(**ROWS, **GREEDY, assistant_model=tiny_draft(target))


def draft_under_autocast(target: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        draft(target)


BEFORE: list[Callable[[Any], None]] = [
    record,
    show_attentions,
    train,
    train_from_the_embedding,
    freeze,
    generate_plainly,
    look_up_prompts,
    draft_by_a_model,
    draft_by_transformers,
    draft,
    draft_under_autocast,
]


@pytest.mark.parametrize("before", BEFORE)
def test_behind_other_uses(before: Callable[[Any], None], seen: Seen) -> None:
    target, own_draft = pair_of()
    before(target)
    assert steps_of(seen, target, own_draft) == {ON}
    num_plans = seen.num_plans
    # What the first call has left behind turns nothing off, and fast forms are looked for once.
    before(target)
    assert steps_of(seen, target, own_draft) == {ON}
    assert seen.num_plans <= num_plans + (before is draft_under_autocast)


def loaded(target: PreTrainedModel, folder: Path, **given: Any) -> Any:
    """Returns a target that was saved and loaded."""
    target.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **given)


OTHERS: dict[str, Callable[[Any, Path], Any]] = {
    "copied": lambda target, folder: copy.deepcopy(target),
    "loaded": loaded,
    "on a device": lambda target, folder: loaded(target, folder, device_map="cpu"),
    "bfloat16": lambda target, folder: target.to(torch.bfloat16),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_target(other: str, seen: Seen, tmp_path: Path) -> None:
    target, own_draft = pair_of()
    record(target)
    steps_of(seen, target, own_draft)
    target = OTHERS[other](target, tmp_path)
    if not packed_weights._computes_alike(target.dtype):
        pytest.skip("products over copies have other bits on this processor")
    assert steps_of(seen, target, own_draft.to(target.dtype)) == {ON}


GIVEN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9},
    "with scores": {"return_dict_in_generate": True, "output_scores": True},
    "with states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "with a cache": {"return_dict_in_generate": True, "output_logits": True},
    "static": {"cache_implementation": "static"},
    "in chunks": {"prefill_chunk_size": 4},
    "by prefixes": {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    "in time": {"max_time": 600.0},
    "streamed": {"streamer": TextIteratorStreamer(cast(Any, Words()))},
}


@pytest.mark.parametrize("name", GIVEN)
def test_settings(name: str, seen: Seen) -> None:
    target, own_draft = pair_of()
    for _ in range(2):
        assert steps_of(seen, target, own_draft, ROW, **GIVEN[name]) == {ON}


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("name", AROUND)
def test_contexts(name: str, seen: Seen) -> None:
    target, own_draft = pair_of()
    for _ in range(2):
        with AROUND[name]():
            assert steps_of(seen, target, own_draft) == {ON}


class Listening(BaseStreamer):
    """Code of the user's, which may use the target between two steps."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@contextmanager
def another_call(monkeypatch: pytest.MonkeyPatch, target: Any) -> Generator[None]:
    """Has another thread be within a call as long as it is open."""
    step: Callable[[Run], Any] = decode.step
    is_running = threading.Event()
    may_go_on = threading.Event()

    def waits(run: Run) -> Any:
        is_running.set()
        may_go_on.wait(60)
        return step(run)

    monkeypatch.setattr(decode, "step", waits)
    other = threading.Thread(target=draft, args=(target,))
    other.start()
    try:
        assert is_running.wait(60)
        monkeypatch.setattr(decode, "step", step)
        yield
    finally:
        may_go_on.set()
        other.join()


def test_beside_another_thread(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    target, own_draft = pair_of()
    with another_call(monkeypatch, target):
        assert steps_of(seen, target, own_draft) == {ON}
        # Layers that the other thread has tapped are fast in a run that is looked at, too.
        seen.steps.clear()
        target.generate(**ROW, **GREEDY, streamer=Listening(), assistant_model=own_draft)
        assert {step.num_fast_layers for step in seen.steps} == {LAYERS}


def set_put(streamer: Any) -> None:
    streamer.put = Listening().put


def set_on_finalized_text(streamer: Any) -> None:
    streamer.on_finalized_text = lambda text, stream_end=False: None


def set_put_tree(streamer: Any) -> None:
    streamer.put_tree = lambda **tree: None


@pytest.mark.parametrize("set_one", [set_put, set_on_finalized_text, set_put_tree])
def test_a_function_on_a_streamer_of_transformers_is_the_users(
    set_one: Callable[[Any], None], seen: Seen
) -> None:
    target, own_draft = pair_of()
    streamer = TextIteratorStreamer(cast(Any, Words()))
    set_one(streamer)
    target.generate(**ROW, **GREEDY, streamer=streamer, assistant_model=own_draft)
    is_on = ON._replace(is_inference=False, is_whole_run=False, has_copies=False)
    assert seen.steps == {is_on}


FAMILIES = ["qwen2", "qwen3-sliding", "qwen3-moe", "llama", "mistral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_whose_layers_are_fast(family: str, seen: Seen) -> None:
    target, own_draft = pair_of(family, tie_word_embeddings=True)
    for _ in range(2):
        assert steps_of(seen, target, own_draft) == {ON}
        record(target)


@pytest.mark.parametrize("family", ["qwen3-vl", "llava-onevision"])
def test_prompts_with_images(family: str, seen: Seen) -> None:
    target: Any = shallow_vision_target(family).float()
    inputs = vision_prompts(target, family, [[(2, 2)]], seed=0)
    own_draft = tiny_draft(target)
    own_draft.generation_config.verify_width = 4
    for _ in range(2):
        assert steps_of(seen, target, own_draft, inputs) == {ON}
        record(target)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "qwen3.5", "lfm2"])
def test_families_of_other_layers(family: str, seen: Seen) -> None:
    target, own_draft = pair_of(family)
    for _ in range(2):
        seen.steps.clear()
        target.generate(**ROWS, **GREEDY, assistant_model=own_draft)
        assert seen.steps == {ON._replace(num_fast_layers=0)}
        record(target)


def test_a_whole_run_looks_for_changes_once(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    look = user_code.is_unmodified

    def counted(parts: Any) -> bool:
        looks.append(None)
        return look(parts)

    monkeypatch.setattr(user_code, "is_unmodified", counted)
    target, draft = pair_of()
    assert steps_of(seen, target, draft) == {ON}
    assert len(looks) == 1


def test_rows_of_a_running_batch(seen: Seen) -> None:
    target, own_draft = pair_of()
    for _ in range(2):
        batch = RunningBatch(target, own_draft)
        for length in (9, 5):
            batch.add(prompts([length], 0)["input_ids"], **GREEDY, repetition_penalty=1.1)
            batch.step()
        while batch.ids:
            batch.step()
        assert seen.steps == {ON}
        record(target)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_a_switch_that_is_off_may_mean_something(family: str) -> None:
    target, own_draft = pair_of(family)
    both_ways: dict[str, Any] = {**ROW, **GREEDY, "is_causal": False}
    plain = target.generate(**both_ways)
    assert not torch.equal(plain, target.generate(**ROW, **GREEDY))
    assert torch.equal(target.generate(**both_ways, assistant_model=own_draft), plain)


class Hooks(StoppingCriteria):
    """Code of the user's that changes the model in the middle of a text."""

    def __init__(self, target: Any) -> None:
        self.attention = target.model.layers[0].self_attn
        self.num_calls = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 3:
            self.handle = self.attention.register_forward_hook(lambda *call: (-call[2][0], None))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_criteria_in_a_list_of_transformers_are_the_users() -> None:
    target, own_draft = pair_of()
    texts = []
    for given in ({}, {"assistant_model": own_draft}):
        hooks = Hooks(target)
        criteria = StoppingCriteriaList([StoppingCriteriaList([hooks])])
        texts.append(target.generate(**ROW, **GREEDY, stopping_criteria=criteria, **given))
        hooks.handle.remove()
    assert not torch.equal(texts[0], target.generate(**ROW, **GREEDY))
    assert torch.equal(*texts)
