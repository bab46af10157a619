"""The target and the draft that are measured, and the prompts: a bundled pair, or one with random weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
)

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.bench.methods import Inputs, Models
from dflash_hf.cli.demo import read_prompts
from dflash_hf.data.prompt_files import as_messages, image_names

from .machine import ROOT

TOY = ROOT / "demos" / "toy"
MIXED = "mixed"  # prompts of all kinds in one batch
# Hidden size, MLP, layers, query heads, key heads, head size, vocabulary; draft layers and taps.
SIZES: dict[str, tuple[int, int, int, int, int, int, int, int, list[int]]] = {
    "tiny": (32, 48, 4, 4, 2, 8, 64, 2, [0, 2]),
    "toy": (192, 512, 12, 6, 2, 32, 1536, 3, [1, 5, 9]),
}


@dataclass(slots=True, kw_only=True)
class Pair:
    """What is measured.

    Args:
        target (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): Its draft.
        name (`str`): What the record calls the pair.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Without one prompts are random ids.
        processor (*optional*): Of a target that takes pictures; prompts are then those of `held_out`.
        held_out (`dict[str, list]`): Kind -> its prompts, as conversations.
        kinds (`tuple[str, ...]`): Kinds of prompt.
        random_lengths (`tuple[int, int]`): Shortest and longest random prompt, in tokens.
    """

    target: PreTrainedModel
    draft: DFlashDraftModel
    name: str
    tokenizer: PreTrainedTokenizerBase | None = None
    processor: Any = None
    held_out: dict[str, list[Any]] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("random",)
    random_lengths: tuple[int, int] = (24, 64)
    _cache: dict[tuple[str, int, int], Inputs] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the pair runs."""
        return self.target.device

    @property
    def block_size(self) -> int:
        """Tokens per block, the anchor included."""
        return int(self.draft.config.block_size)

    @property
    def dtype(self) -> str:
        """The dtype both run in."""
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def models(self) -> Models:
        """The pair as ways of decoding take it."""
        return Models(
            target=self.target, processor=self.processor or self.tokenizer, draft=self.draft
        )

    def inputs(self, kind: str, first: int, count: int) -> Inputs:
        """Returns `count` held-out prompts of a kind from index `first` on, left-padded: ids and mask `[B, S]`.

        With pictures also what the processor makes of them. Where prompts run out they start again.
        """
        key = (kind, first, count)
        if key not in self._cache:
            make = self._random_inputs if self.tokenizer is None else self._text_inputs
            make = make if self.processor is None else self._picture_inputs
            self._cache[key] = {name: tensor.to(self.device) for name, tensor in make(*key).items()}
        return self._cache[key]

    def _text_inputs(self, kind: str, first: int, count: int) -> Inputs:
        assert self.tokenizer is not None
        make_sample = _toy_tasks().make_sample
        samples = [make_sample(kind, "heldout", first + index) for index in range(count)]
        encoded = self.tokenizer.apply_chat_template(
            [list(sample.messages) for sample in samples],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            padding=True,
        )
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}

    def _picture_inputs(self, kind: str, first: int, count: int) -> Inputs:
        encoded = self.processor.apply_chat_template(
            [as_messages(prompt) for prompt in self._chosen(kind, first, count)],
            add_generation_prompt=True,
            tokenize=True,
            return_tensors="pt",
            return_dict=True,
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
        return dict(encoded)

    def _chosen(self, kind: str, first: int, count: int) -> list[Any]:
        """Held-out prompts of a kind; one of each kind in turn for `MIXED`."""
        if kind != MIXED:
            rows = self.held_out[kind]
            return [rows[(first + index) % len(rows)] for index in range(count)]
        kinds = [self.kinds[index % len(self.kinds)] for index in range(first, first + count)]
        return [
            self._chosen(kind, (first + index) // len(self.kinds), 1)[0]
            for index, kind in enumerate(kinds)
        ]

    def count(self, kind: str) -> int:
        """Returns how many prompts of a kind there are; made ones do not run out."""
        if not self.held_out:
            return sys.maxsize
        return sum(map(len, self.held_out.values())) if kind == MIXED else len(self.held_out[kind])

    @property
    def takes_pictures(self) -> bool:
        """Returns True if prompts may have pictures."""
        return self.processor is not None

    @property
    def picture_kinds(self) -> tuple[str, ...]:
        """Kinds whose prompts have pictures."""
        return tuple(
            kind for kind, prompts in self.held_out.items() if any(map(image_names, prompts))
        )

    def _random_inputs(self, kind: str, first: int, count: int) -> Inputs:
        generator = torch.Generator().manual_seed(first)
        low, high = self.random_lengths
        lengths = torch.randint(low, high + 1, (count,), generator=generator)
        longest = int(lengths.max())
        # Below the special tokens of the published vocabularies: a picture's would ask for a picture.
        vocab = min(int(self.target.config.get_text_config().vocab_size) - 1, 120_000)
        ids = torch.randint(3, vocab, (count, longest), generator=generator)
        mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
        return {"input_ids": ids * mask, "attention_mask": mask}


def _toy_tasks() -> Any:
    """The bundled pair's prompts; its folder is a folder of scripts, not a package."""
    if str(TOY) not in sys.path:
        sys.path.insert(0, str(TOY))
    import tasks

    return tasks


def load_pair(
    target: Path,
    draft: Path,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int | None = None,
    *,
    vision: bool = False,
) -> Pair:
    """Loads a pair from its folders; `block_size` narrows the draft's block for every method alike.

    With `vision` the target is loaded with its processor, and prompts are those of held_out.jsonl beside its folder.

    Raises:
        ValueError: If a folder is not there, or the block is wider than the draft was trained for.
    """
    for role, folder in (("target", target), ("draft", draft)):
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"expected a {role} with a config.json in {folder}, got none; train it (demos/toy), name another "
                "folder with --target and --draft, or measure random weights with --random toy"
            )
    model_class = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model = model_class.from_pretrained(target, dtype=dtype).to(device).eval()
    drafter = DFlashDraftModel.from_pretrained(draft, dtype=dtype).to(device).eval()
    _narrow(drafter, block_size)
    if vision:
        held_out: dict[str, list[Any]] = {}
        for row in read_prompts(target.parent / "held_out.jsonl", per_kind=sys.maxsize):
            held_out.setdefault(row["kind"], []).append(row["messages"])
        processor: Any = AutoProcessor.from_pretrained(target)
        return Pair(
            target=model,
            draft=drafter,
            name=f"{target} + {draft}",
            tokenizer=processor.tokenizer,
            processor=processor,
            held_out=held_out,
            kinds=tuple(held_out),
        )
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    kinds = tuple(str(kind) for kind in _toy_tasks().KINDS)
    return Pair(
        target=model, draft=drafter, name=f"{target} + {draft}", tokenizer=tokenizer, kinds=kinds
    )


def random_pair(
    size: str,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int | None = None,
    lengths: tuple[int, int] = (24, 64),
    max_length: int = 1024,
    seed: int = 0,
) -> Pair:
    """Builds a pair with random weights: almost nothing is ever accepted, but every step costs what it costs.

    Args:
        size (`str`): One of `SIZES`.
        dtype, device: Of both models.
        block_size (`int`, *optional*): Tokens per block; 16, or 8 for `"tiny"`.
        lengths (`tuple[int, int]`): Shortest and longest prompt, in tokens.
        max_length (`int`): Longest sequence the target is made for.
        seed (`int`): Of the weights.

    Raises:
        ValueError: If the size is not known.
    """
    if size not in SIZES:
        raise ValueError(f"expected a size in {sorted(SIZES)}, got {size!r}; choose one of them")
    hidden, mlp, depth, heads, key_heads, head_dim, vocab, draft_layers, taps = SIZES[size]
    shared: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_length,
        # Wide enough for texts that do not repeat themselves, which would hide errors.
        "initializer_range": 0.25,
        "rms_norm_eps": 1e-6,
    }
    config = Qwen3Config(
        **shared, num_hidden_layers=depth, tie_word_embeddings=False, pad_token_id=0
    )
    draft_config = DFlashConfig(
        **shared,
        num_hidden_layers=draft_layers,
        block_size=block_size or (8 if size == "tiny" else 16),
        mask_token_id=vocab - 1,
        num_target_layers=depth,
        target_layer_ids=taps,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype)
        draft = DFlashDraftModel._from_config(draft_config, dtype=dtype)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return Pair(
        target=target.to(device).eval(),
        draft=draft.to(device).eval(),
        name=f"random {size} (seed {seed})",
        random_lengths=lengths,
    )


def _narrow(draft: DFlashDraftModel, block_size: int | None) -> None:
    """Sets the block in the config, where stock `generate` and z-lab's package look for it too."""
    if block_size is None:
        return
    if not 2 <= block_size <= draft.config.block_size:
        raise ValueError(
            f"expected a block of 2 to {draft.config.block_size} tokens (the draft's), got {block_size}; choose a "
            "smaller one"
        )
    draft.config.block_size = block_size


def never_right(draft: DFlashDraftModel) -> DFlashDraftModel:
    """Returns a draft of the same shape that has learned nothing."""
    torch.manual_seed(0)
    made: Any = DFlashDraftModel(draft.config)
    return made.to(draft.dtype).eval()
