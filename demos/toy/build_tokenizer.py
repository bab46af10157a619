"""Build the tokenizer of the toy pair: a small byte-level BPE trained on generated conversations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import print as rich_print
from tasks import KINDS, make_sample
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TARGET_DIR: Final = Path(__file__).resolve().parent / "target"
VOCAB_SIZE: Final = 1536
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
PAD: Final = "<|endoftext|>"
MASK: Final = "<|MASK|>"
MAX_LENGTH: Final = 1024
# Words with their leading space, single digits, runs of other signs, runs of white space.
_PIECES: Final = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def _texts(per_kind: int) -> Iterator[str]:
    """Yield the turns of training conversations."""
    for index in range(per_kind):
        for kind in KINDS:
            for message in make_sample(kind, "train", index).conversation():
                yield f"{message['role']}\n{message['content']}"


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, special_tokens: list[str], chat_template: str
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts; the first four special tokens are padding, turn begin, turn end and mask."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if core.get_vocab_size() != vocab_size:
        raise ValueError(
            f"expected {vocab_size} tokens, got {core.get_vocab_size()}; give it more texts."
        )
    pad, begin, end, mask, *others = special_tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=end,
        pad_token=pad,
        mask_token=mask,
        additional_special_tokens=[begin, *others],
        chat_template=chat_template,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_tokenizer(per_kind: int = 4000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `per_kind` conversations of each kind; the result is deterministic."""
    return train_tokenizer(
        _texts(per_kind), VOCAB_SIZE, [PAD, IM_START, IM_END, MASK], CHAT_TEMPLATE
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder to write the tokenizer files to.")] = TARGET_DIR,
    per_kind: Annotated[
        int, typer.Option(help="Conversations of each kind to learn the merges from.")
    ] = 4000,
) -> None:
    """Build the tokenizer and save it."""
    tokenizer = build_tokenizer(per_kind)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    rich_print(f"{len(tokenizer)} tokens written to {out}")


if __name__ == "__main__":
    typer.run(main)
