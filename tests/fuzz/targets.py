"""Targets and drafts of the fuzzer: tiny models built once per process, and drafts that are right in random places."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_hf import DFlashCandidateGenerator, DFlashDraftModel, free_buffers
from helpers import families
from helpers.hybrid import use_float64_rules
from helpers.static import TensorOracle
from helpers.vision import VISION, VISION_HYBRIDS, vision_target
from tiny import DFLASH2, FAMILIES, HYBRIDS, draft_config, randomise_heads, tiny_target

# Built from their config classes, each for something that the families of `tiny` do not have: learned positions,
# parallel blocks, layer norms, partial or no RoPE, latent attention, two attention calls a layer.
OTHERS = (
    *(
        "gpt2",
        "opt",
        "gpt_bigcode",
        "gpt_neox",
        "phi",
        "starcoder2",
        "olmo2",
        "cohere2",
        "mixtral",
        "deepseek_v3",
    ),
    *("exaone4", "ministral", "diffllama", "moshi", "granite", "glm4", "smollm3", "persimmon"),
)
TEXT = (*FAMILIES, *HYBRIDS, *OTHERS)
# Tables of learned positions, short enough that conversations reach their end.
NUM_POSITIONS = 64
LEARNED = ("gpt2", "opt", "gpt_bigcode")
IMAGES = (*VISION, *VISION_HYBRIDS)
RECURRENT = (*HYBRIDS, *VISION_HYBRIDS)
# Float32 rounds by the shape of a call: a text may part from plain `generate`'s where two scores are this close.
TIE = 1e-4
ROUNDED = {"gemma2", *OTHERS}

DRAFTS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "full": {"layer_types": ["full_attention"] * 2},
    "causal": {"layer_types": ["full_attention"] * 2, "is_causal": True},
    "from anchor": {"sample_from_anchor": True},
    "window from anchor": {
        "layer_types": ["sliding_attention"] * 2,
        "window_from_anchor": True,
        "sliding_window": 5,
    },
    "own weights": {"own_embed_tokens": True, "own_lm_head": True},
    "first layer's input": {"target_layer_ids": [-1, 1, 3]},
    "dflash2": DFLASH2,
}


class Oracle(TensorOracle):
    """A draft that knows the text and is wrong in one place of each block, or in none, or everywhere.

    What follows the wrong token is right again: whoever counts all matches, and not those before the first mismatch,
    is found out. Where a block stands is taken from the run, not from the draft's own count, which begins later where
    a cache has no context for it. Reads nothing on the host, so that it can be captured.
    """

    block_positions: Tensor

    def compute_logits(self, hidden_states: Tensor, head: nn.Module) -> Tensor:
        """Replaces the head's logits by what it wants to propose."""
        logits = DFlashDraftModel.compute_logits(self, hidden_states, head)
        batch, width, vocab = logits.shape
        first = self.block_positions[:batch, :1] + 1
        slots, rows = (
            torch.arange(width, device=first.device),
            torch.tensor(self.rows_of(batch), device=first.device),
        )
        drawn = torch.frac(
            torch.sin(first.double() * 12.9898 + rows[:, None] * 78.233 + self.seed) * 43758.5453
        ).abs()
        true = self.known[rows].gather(1, (first + slots).clamp_max(self.known.shape[1] - 1))
        wrong = torch.floor(drawn * (width + 2)) - 1  # -1 is everywhere, `width` is nowhere
        is_wrong = (slots == wrong) | (wrong < 0)
        wanted = torch.where(is_wrong, (true + 1 + slots) % vocab, true)
        # For trees: what is second and third; where the first is wrong that may be the truth, at either place.
        rank = torch.floor(torch.frac(drawn * 64 + slots * 0.37) * 4)
        others = [
            torch.where(
                is_wrong & (rank == place), true, (true + 2 * vocab // 3 + place + slots) % vocab
            )
            for place in (0, 1)
        ]
        ids = torch.arange(vocab, device=first.device)
        found = torch.zeros_like(logits)
        for token, share in ((others[1], 0.5), (others[0], 0.75), (wanted, 1.0)):
            found = torch.where(ids == token[..., None], share * self.strength, found)
        return found


def _tell_where_blocks_stand() -> None:
    """Has every proposal of an [`Oracle`] know the positions of its block in the target's count."""
    propose = DFlashCandidateGenerator.propose

    def told(
        self: DFlashCandidateGenerator, state: Any, block: Any, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(self.draft, Oracle):
            self.draft.block_positions = block.positions
        propose(self, state, block, *args, **kwargs)

    if getattr(propose, "__name__", "") != "told":
        DFlashCandidateGenerator.propose = told  # pyright: ignore[reportAttributeAccessIssue]


_tell_where_blocks_stand()
_rules = pytest.MonkeyPatch()


@functools.cache
def target_of(name: str) -> PreTrainedModel:
    """Returns the target of that name, the same one for all cases of a process."""
    if name in IMAGES:
        target = vision_target(name)
    else:
        target = families.build(name, **_short(name)) if name in OTHERS else tiny_target(name)
    if name in HYBRIDS or name in VISION_HYBRIDS:
        use_float64_rules(_rules, target)
    return target


def _short(name: str) -> dict[str, int]:
    key = "max_position_embeddings" if name == "opt" else "n_positions"
    return {key: NUM_POSITIONS} if name in LEARNED else {}


@functools.cache
def draft_of(target: str, kind: str) -> Oracle:
    """Returns a draft for a target, the same one for all cases: what it keeps between calls is meant to be there."""
    model = target_of(target)
    torch.manual_seed(0)
    draft = Oracle(draft_config(model, 12, **DRAFTS[kind])).to(model.dtype).eval()
    randomise_heads(draft)
    return draft


def forget() -> None:
    """Forgets all models, and gives Transformers its rules back: other tests of the process want them as they are."""
    draft_of.cache_clear()
    target_of.cache_clear()
    _rules.undo()


def arm(
    draft: Oracle, truth: list[list[int]], seed: int, rule: str | None, nodes: int | None = None
) -> None:
    """Tells a draft the text, and how sure it is: less so where its probabilities count."""
    draft.arm(truth, seed)
    if rule == "sample":
        # A graph replays what its draft knew when it was captured, and what is drawn here follows from that.
        free_buffers(draft)
    is_unsure = rule == "sample" or nodes is not None or draft.candidate_selector is not None
    draft.strength = 4.0 if is_unsure else 100.0


def left_behind(target: PreTrainedModel) -> dict[str, Any]:
    """Returns what a call must leave as it was, as far as this thread sees it."""
    modules = list(target.modules())
    hooks = [
        hook
        for m in modules
        for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    ]
    return {
        # Transformers puts its own on for good when hidden states are first asked for.
        "hooks": [
            hook for hook in hooks if hook.__module__ != "transformers.utils.output_capturing"
        ],
        "forwards": [vars(module).get("forward") for module in modules],
        "attention": target.config.get_text_config()._attn_implementation,
        "config": target.config.to_dict(),
        "settings": target.generation_config.to_dict(),
        "weights": sum(
            parameter._version for parameter in target.parameters() if not parameter.is_inference()
        ),
        "training": [module.training for module in modules],
        "modes": (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
        ),
        "threads": threading.active_count(),
    }
