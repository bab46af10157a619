"""This module finds out why a draft is not accepted. A wrong setting makes the draft guess badly, but changes no text.

`diagnose` checks config, weights and tokenizer, and measures. On the target's own answers, it tries other plausible
forms of each setting. If a form accepts clearly more than the draft as configured, this is a finding. The best change
is adopted, and the other settings are tried again on top of it, so that one mistake does not look like several.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf.checkpoints.fresh import rope_of
from dflash_hf.data.prompt_files import Prompt, check_prompts, image_names
from dflash_hf.doctor.precision import compare_precision
from dflash_hf.doctor.probe import Measurement, Probe, Setup
from dflash_hf.draft_model.layers import DFlashRMSNorm
from dflash_hf.errors import require
from dflash_hf.generation.checks import check_is_draft
from dflash_hf.generation.generate import unwrapped, unwrapped_target
from dflash_hf.layer_configs import layer_values
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import Processor, encode_prompt, tokenizer_of
from dflash_hf.target_model.parts import Target, end_tokens, find_target
from dflash_hf.target_model.support import check_pair, check_target
from dflash_hf.training.example import Example
from dflash_hf.training.target_answers import regenerate_answers

logger = logging.getLogger(__name__)

Status = Literal["ok", "finding", "skipped"]

# Used for a target with a chat template if the caller gives no prompts.
PROMPTS: tuple[str, ...] = (
    "Hello! How are you today?",
    "What is 17 + 25 - 9? Show the steps.",
    "Write a Python function that returns the largest number in a list.",
    "Name the days of the week as a JSON list.",
    "Explain in three sentences why the sky is blue.",
    "Karin has 81 shells and gives away 32. How many are left?",
)
# With fewer tokens per verify, almost nothing is accepted.
NEAR_RANDOM = 1.3
MAX_MASK_CANDIDATES = 12
# Numbers of the newest tokens to which the context of a draft with full attention is limited, in long texts.
WINDOWS = (2048, 512)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    # What was checked: `"tap_offset"`, `"deepstack"`, `"mask_token"`, `"causality"`, `"sliding_window"`, `"rope"`,
    # `"dtype"`, `"weights"`, `"vocabulary"`, `"precision"`, `"chat_template"`, `"thinking"` or `"other_target"`.
    name: str
    status: Status
    sentence: str  # what was found
    advice: str = ""  # what to do about a finding
    # Setting -> mean number of tokens that a verify would commit, over all anchors.
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`."""

    # Tokens per verify of greedy decoding on the prompts, as configured, for a chain. 0 if nothing could be measured.
    acceptance_length: float
    # Number of prompts, and of the tokens of their answers, that were measured on.
    num_prompts: int
    num_tokens: int
    checks: list[Check]
    # The same for a tree with as many tokens, from the draft's proposals alone. `None` if the target cannot verify a
    # tree, or if nothing could be measured.
    tree_acceptance_length: float | None = None

    @property
    def findings(self) -> list[Check]:
        """The checks that found something."""
        return [check for check in self.checks if check.status == "finding"]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values, for JSON."""
        return {
            "healthy": not self.findings,
            "findings": [check.name for check in self.findings],
            **asdict(self),
        }


class Trial(NamedTuple):
    """Another plausible form of one setting, with its label, the advice if it is the right one, and the change."""

    check: str
    label: str
    advice: str
    change: Setup


def diagnose(
    model: PreTrainedModel,
    draft: DFlashDraftModel,
    processor: Processor,
    prompts: Sequence[Prompt] | None = None,
    *,
    num_prompts: int | None = None,
    max_new_tokens: int = 96,
    on_progress: Callable[[str], object] = lambda what: None,
) -> Diagnosis:
    """Finds what keeps a draft from being accepted. Target and draft are not changed.

    Args:
        model (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): Its draft.
        processor (tokenizer or processor): The target's tokenizer or processor.
        prompts (sequence of texts or conversations, *optional*): The prompts to measure on. With more prompts, smaller
            differences count as clear. They may contain images if the target takes images. The default is a few
            built-in texts, if there is a chat template.
        num_prompts (`int`, *optional*): How many of the prompts (also of the built-in ones) are used; default all.
        max_new_tokens (`int`): Maximum number of tokens of an answer.
        on_progress (callable): Gets a few words that say what is being done, whenever this changes.

    Raises:
        ValueError: If the target cannot be drafted for at all, `draft` is not a draft, or there is nothing to measure
            on.
    """
    model = unwrapped_target(model)
    draft = unwrapped(draft)
    check_is_draft(draft)
    target = find_target(model)
    check_target(target)
    tokenizer = tokenizer_of(processor)
    if prompts is None and processor.chat_template is None:
        raise ValueError(
            "expected prompts for a tokenizer without a chat template, got none; give texts of the kind this target "
            "is used for"
        )
    if prompts is None:
        prompts = PROMPTS
    check_prompts(prompts)
    prompts = prompts[:num_prompts]
    if not prompts:
        raise ValueError(
            "expected at least one prompt, got none; give texts of the kind this target is used for"
        )
    static = [
        _check_vocabulary(target, draft, tokenizer),
        _check_weights(draft),
        _check_precision(model, draft),
    ]
    try:
        check_pair(target, draft.config)
    except ValueError as error:
        advice = "load the draft that was trained for this target"
        static.append(Check("other_target", "finding", str(error), advice))
        return Diagnosis(acceptance_length=0.0, num_prompts=0, num_tokens=0, checks=static)
    on_progress("answering the prompts")
    examples = write_answers(
        model, [encode_prompt(processor, p, model.device) for p in prompts], max_new_tokens
    )
    longest = max(len(example.input_ids) - example.prompt_length() for example in examples)
    # The first token of an answer comes from the prefill. Only the tokens after it are guessed.
    if longest < 2:
        raise ValueError(
            "expected an answer of at least 2 tokens, got none; give other prompts, or a larger max_new_tokens"
        )
    probe = Probe(target, draft, examples)
    setup, measured = _try_settings(probe, tokenizer, on_progress)
    checks = static + measured
    on_progress("trying other forms of the prompts")
    checks += _check_prompts(probe, processor, prompts, setup, max_new_tokens)
    checks.append(
        _check_fit(probe, setup, [check.name for check in checks if check.status == "finding"])
    )
    by_tree = None
    if not target.recurrences:
        by_tree = probe.walked({}, is_tree=True)
    return Diagnosis(
        acceptance_length=probe.walked({}),
        tree_acceptance_length=by_tree,
        num_prompts=len(prompts),
        num_tokens=sum(len(e.input_ids) - e.prompt_length() for e in examples),
        checks=checks,
    )


def write_answers(
    model: PreTrainedModel, inputs: Sequence[dict[str, Tensor]], max_new_tokens: int
) -> list[Example]:
    """Answers prompts of one row each with plain greedy `generate`. Returns prompt and answer together.

    Raises:
        ValueError: If a prompt has no token.
    """
    for row in inputs:
        is_empty = row["input_ids"].shape[1] == 0
        require(not is_empty, "prompts of at least one token", "an empty one", "give it a text")
    prompts = [Example.from_pair(row, []) for row in inputs]
    config: Any = model.generation_config
    ends = end_tokens(model)
    pad_token_id = config.pad_token_id
    if pad_token_id is None:
        pad_token_id = next(iter(ends), 0)
    answers = regenerate_answers(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad_token_id,
        batch_size=8,
    )
    return [prompt.with_answer(answer) for prompt, answer in zip(prompts, answers, strict=True)]


def _try_settings(
    probe: Probe, tokenizer: PreTrainedTokenizerBase, on_progress: Callable[[str], object]
) -> tuple[Setup, list[Check]]:
    """Adopts the best clear gain until there is none. Returns the setup that was reached, and a check per setting."""
    setup = Setup()
    base = probe.measure({})
    found: dict[str, Check] = {}
    while True:
        best: tuple[Trial, Measurement] | None = None
        results: dict[str, dict[str, float]] = {}
        for trial in (trial for trial in _trials(probe, tokenizer) if trial.check not in found):
            on_progress(f"trying {trial.label}")
            result = probe.measure(setup | trial.change)
            results.setdefault(trial.check, {})[trial.label] = round(result.mean, 3)
            # The more plausible forms come first. A later form must be better by more than chance.
            if result.beats(base) and (best is None or result.mean > 1.02 * best[1].mean):
                best = trial, result
        if best is None:
            return setup, [
                found.get(name) or _unchanged(probe, name, base, results.get(name))
                for name in EXPLAINED
            ]
        trial, result = best
        sentence = f"{trial.label} accepts {result.mean:.2f} tokens per verify, as configured {base.mean:.2f}"
        measured = {"as configured": round(base.mean, 3), **results[trial.check]}
        found[trial.check] = Check(trial.check, "finding", sentence, trial.advice, measured)
        setup = setup | trial.change
        base = result
        logger.info("adopted %s: %s", trial.check, sentence)


# Measured settings in the order of the report -> the sentence if nothing could be tried.
EXPLAINED = {
    "tap_offset": "no neighbouring layers to tap",
    "deepstack": "no tap is where DeepStack adds features of an image, or no prompt has one",
    "mask_token": "no other special or unused token to try",
    "causality": "nothing to flip",
    "sliding_window": "no text is longer than a window to try; give longer prompts to see if draft_window pays",
    "rope": "the draft's RoPE is the target's",
    "dtype": "the draft runs in float32 or wider already",
}


def _unchanged(probe: Probe, name: str, base: Measurement, tried: dict[str, float] | None) -> Check:
    """Returns the check of a setting for which no other form is clearly better."""
    if tried is None:
        if name == "rope" and rope_of(probe.target.config) is None:
            return Check(name, "skipped", "the target has no RoPE to try")
        is_fine = name in ("rope", "dtype")
        status: Status = "skipped"
        if is_fine:
            status = "ok"
        return Check(name, status, EXPLAINED[name])
    best = max(tried, key=lambda label: tried[label])
    sentence = (
        f"nothing tried is clearly better: {best} {tried[best]:.2f}, as configured {base.mean:.2f}"
    )
    return Check(name, "ok", sentence, measured={"as configured": round(base.mean, 3), **tried})


def _trials(probe: Probe, tokenizer: PreTrainedTokenizerBase) -> Iterator[Trial]:
    """Yields every other plausible form of every setting. For each setting, the more likely forms come first."""
    config = probe.draft.config
    for shift in (1, -1):
        ids = probe.shifted(shift)
        advice = f"set target_layer_ids to {ids}: 0-based layers whose output is tapped, hidden_states[i + 1]"
        yield Trial("tap_offset", f"taps {shift:+d}", advice, {"target_layer_ids": ids})
    if probe.deepstack_differs:
        after = not config.tap_after_deepstack
        label = "taps before DeepStack's additions"
        if after:
            label = "taps after DeepStack's additions"
        yield Trial(
            "deepstack",
            label,
            f"set tap_after_deepstack to {after}",
            {"tap_after_deepstack": after},
        )
    for token_id in mask_candidates(probe.target, probe.draft, tokenizer):
        advice = f"set mask_token_id to {token_id}, the token that the draft's blocks were filled with in training"
        yield Trial("mask_token", f"mask {token_id}", advice, {"mask_token_id": token_id})
    now = config.is_causal
    count = config.num_hidden_layers
    others = {
        str(flags): flags for flags in ([not flag for flag in now], [False] * count, [True] * count)
    }
    for flags in others.values():
        if flags != now:
            label = f"is_causal {flags}"
            # No config of another format can say this for each layer.
            advice = f"load the draft with load_draft(..., is_causal={flags})"
            if len(set(flags)) == 1:
                label = f"is_causal {flags[0]}"
                advice = f"set is_causal to {flags[0]}"
            yield Trial("causality", label, advice, {"is_causal": flags})
    yield from _window_trials(probe)
    yield from _rope_trials(probe)
    if probe.draft.dtype in (torch.float16, torch.bfloat16):
        advice = "load the draft with dtype=torch.float32, or bfloat16 where it is float16 now"
        yield Trial("dtype", "draft in float32", advice, {"dtype": torch.float32})


def _window_trials(probe: Probe) -> Iterator[Trial]:
    """Yields no window if layers slide, otherwise values of `draft_window`. Texts must be longer than the window."""
    config = probe.draft.config
    count = config.num_hidden_layers
    longest = max(len(example.input_ids) for example in probe.examples)
    own = config.sliding_window
    if own is not None and longest > own:
        change = {
            "sliding_window": None,
            "layer_types": ["full_attention"] * count,
            "is_causal": config.is_causal,
        }
        advice = "set every entry of layer_types to 'full_attention'"
        # If `is_causal` is left out, layers are causal because they slide.
        if all(config.is_causal):
            advice += ", and is_causal to True"
        elif any(config.is_causal):
            types = f"layer_types={change['layer_types']}"
            advice = f"load the draft with load_draft(..., {types}, is_causal={config.is_causal})"
        yield Trial("sliding_window", "no window", advice, change)
    if own is not None:
        return
    theirs = [window for window in layer_values(probe.target.config, "sliding_window") if window]
    for window in dict.fromkeys((*theirs[:1], *WINDOWS)):
        if longest <= window:
            continue
        advice = (
            f"set draft.generation_config.draft_window = {window}: texts are longer than what the draft does well "
            "on, and it then sees the newest tokens only"
        )
        # This is the change that `draft_window` makes to full layers.
        change = {
            "sliding_window": window,
            "layer_types": ["sliding_attention"] * count,
            "window_from_anchor": True,
            "is_causal": config.is_causal,
        }
        yield Trial("sliding_window", f"draft_window {window}", advice, change)


def _rope_trials(probe: Probe) -> Iterator[Trial]:
    """Yields RoPEs other than the draft's: over other parts of heads, with the target's theta, and the target's."""
    own = probe.draft.config.rope_parameters
    theirs = rope_of(probe.target.config)
    yield from _part_trials(probe)
    if theirs is None:
        return
    theta = theirs["rope_theta"]
    kind = theirs["rope_type"]
    if theta != own["rope_theta"]:
        advice = f"set rope_parameters['rope_theta'] to {theta:g}, the target's"
        yield Trial(
            "rope", f"theta {theta:g}", advice, {"rope_parameters": {**own, "rope_theta": theta}}
        )
    # RoPEs of the same type may still differ, for example in their factor.
    differs = {**own, "rope_theta": theta} != theirs
    # There is no other type of RoPE that turns parts of heads.
    turns_part = "partial_rotary_factor" in own
    if differs and not turns_part:
        advice = f"set rope_parameters to {theirs}, the target's"
        yield Trial("rope", f"the target's {kind} RoPE", advice, {"rope_parameters": theirs})


def _part_trials(probe: Probe) -> Iterator[Trial]:
    """Yields RoPEs over whole heads and over the part that the target turns, if the draft may turn a part."""
    config = probe.draft.config
    own = config.rope_parameters
    is_plain = own["rope_type"] == "default" and config.layer_family == "qwen3"
    if not is_plain and own["rope_type"] != "proportional":
        return
    theirs: dict[str, Any] = getattr(probe.target.config, "rope_parameters", None) or {}
    theirs = theirs.get("full_attention", theirs)  # if each kind of layer has its own RoPE
    now = own.get("partial_rotary_factor", 1.0)
    for part in dict.fromkeys((1.0, theirs.get("partial_rotary_factor") or 1.0)):
        turned = int(config.head_dim * part)
        # RoPE turns pairs of channels, so their number must be even.
        if part == now or turned == 0 or turned % 2:
            continue
        advice = f"set rope_parameters['partial_rotary_factor'] to {part:g}"
        change = {"rope_parameters": {**own, "partial_rotary_factor": part}}
        label = f"RoPE over {part:g} of each head"
        if part == 1.0:
            label = "RoPE over whole heads"
        yield Trial("rope", label, advice, change)


def mask_candidates(
    target: Target, draft: DFlashDraftModel, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Returns ids that may have filled the blocks in training: the mask token, unused rows, other special tokens."""
    unused = [len(tokenizer), len(tokenizer) + 1, target.vocab_size - 1]
    special = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}, reverse=True)
    ordered = [
        tokenizer.mask_token_id,
        *unused,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        *special,
    ]
    usable = [
        i
        for i in dict.fromkeys(ordered)
        if isinstance(i, int) and 0 <= i < (draft.config.vocab_size or i + 1)
    ]
    return [i for i in usable if i < target.vocab_size and i != draft.config.mask_token_id][
        :MAX_MASK_CANDIDATES
    ]


def _check_vocabulary(
    target: Target, draft: DFlashDraftModel, tokenizer: PreTrainedTokenizerBase
) -> Check:
    """Checks whether tokenizer, target and draft can mean the same ids."""
    rows = target.vocab_size
    size = len(tokenizer)
    mask = draft.config.mask_token_id
    beyond = sorted(i for i in tokenizer.all_special_ids if i >= rows)
    wrong = [f"the tokenizer has {size} ids, the target's embedding {rows} rows"] * (size > rows)
    wrong += [f"special ids {beyond} lie outside the target's embedding"] * bool(beyond)
    wrong += [f"the mask token {mask} is an end-of-sequence token"] * (
        mask in end_tokens(target.model)
    )
    advice = "use the tokenizer and the draft that belong to this target"
    return _judged(
        "vocabulary",
        wrong,
        advice,
        f"{size} ids of the tokenizer within {rows} rows of the embedding",
    )


def _check_weights(draft: DFlashDraftModel) -> Check:
    """Checks whether weights look trained: no NaN or infinity, no weight of zeros, no norm as initialised."""
    wrong: list[str] = []
    for name, tensor in draft.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            wrong.append(f"{name} has NaN or infinite values")
        elif not bool(tensor.any()) and not name.endswith("bias"):
            wrong.append(f"{name} is all zeros")
    unit = [
        n
        for n, m in draft.named_modules()
        if isinstance(m, DFlashRMSNorm) and bool((m.weight == 1).all())
    ]
    if unit:
        wrong.append(f"{', '.join(unit)} are ones everywhere, as before any training")
    advice = "the checkpoint was not (wholly) trained, or lost weights on the way; export or download it again"
    fine = f"{sum(1 for _ in draft.parameters())} tensors, all finite, no norm as initialised"
    return _judged("weights", wrong, advice, fine)


def _check_precision(model: PreTrainedModel, draft: DFlashDraftModel) -> Check:
    """Checks whether the target is quantised as the draft's files say."""
    fits, sentence = compare_precision(model, draft)
    if fits is None:
        return Check("precision", "skipped", sentence)
    if fits:
        return Check("precision", "ok", sentence)
    advice = "take the target that the draft names, or the draft of this target's precision"
    return Check("precision", "finding", sentence, advice)


def _judged(
    name: str, wrong: list[str], advice: str, fine: str, measured: dict[str, float] | None = None
) -> Check:
    """Returns the check of something that is either fine or a finding."""
    if not wrong:
        return Check(name, "ok", fine, measured=measured or {})
    return Check(name, "finding", "; ".join(wrong), advice, measured or {})


def _check_prompts(
    probe: Probe, processor: Processor, prompts: Sequence[Prompt], setup: Setup, max_new_tokens: int
) -> list[Check]:
    """Measures acceptance without the chat template, and with thinking on and off if the template has this option."""
    template = processor.chat_template
    if template is None:
        why = "the tokenizer has no chat template"
        return [Check(name, "skipped", why) for name in ("chat_template", "thinking")]
    base = probe.measure(setup)
    model = probe.target.model

    def encode(**options: Any) -> list[dict[str, Tensor]]:
        return [encode_prompt(processor, prompt, model.device, **options) for prompt in prompts]

    def measure(inputs: Sequence[dict[str, Tensor]]) -> Measurement:
        return Probe(
            probe.target, probe.draft, write_answers(model, inputs, max_new_tokens)
        ).measure(setup)

    def judge(name: str, results: dict[str, Measurement], advice: str) -> Check:
        measured = {
            "as configured": round(base.mean, 3),
            **{k: round(v.mean, 3) for k, v in results.items()},
        }
        best = max(results, key=lambda label: results[label].mean)
        # The texts differ between the forms. Only a gain that no choice of texts can explain counts.
        bad = results[best].mean > 1.25 * base.mean + 0.5
        sentence = (
            f"{best} {measured[best]:.2f} tokens per verify, as the prompts are {base.mean:.2f}"
        )
        return _judged(name, [sentence] * bad, advice.format(best=best), sentence, measured)

    advice = "the draft was trained on texts without the chat template; use it on those, or one trained with it"
    if any(image_names(prompt) for prompt in prompts):
        checks = [Check("chat_template", "skipped", "the chat template says where the images are")]
    else:
        bare = encode(template=False)
        if all(row["input_ids"].shape[1] for row in bare):
            checks = [judge("chat_template", {"without the template": measure(bare)}, advice)]
        else:
            why = "a prompt is empty without the chat template"
            checks = [Check("chat_template", "skipped", why)]
    if "enable_thinking" not in str(template):
        return [*checks, Check("thinking", "skipped", "the chat template has no enable_thinking")]
    modes = {
        f"enable_thinking={mode}": measure(encode(enable_thinking=mode)) for mode in (False, True)
    }
    advice = "the draft was trained on answers with {best}; pass that to apply_chat_template"
    return [*checks, judge("thinking", modes, advice)]


def _check_fit(probe: Probe, setup: Setup, findings: list[str]) -> Check:
    """Checks whether the draft predicts this target at all, with the best settings that were found."""
    reached = probe.measure(setup).mean
    bad = reached < NEAR_RANDOM and "weights" not in findings
    wrong = [
        f"{reached:.2f} tokens per verify with the best settings found: next to nothing is accepted"
    ] * bad
    advice = "the draft was trained for another target (or other weights of it), or hardly at all; load the right one"
    fine = f"{reached:.2f} tokens per verify over all anchors, with the best settings found"
    return _judged("other_target", wrong, advice, fine, {"best setup": round(reached, 3)})
