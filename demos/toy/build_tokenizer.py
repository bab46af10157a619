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


def build_tokenizer(per_kind: int = 4000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `per_kind` conversations of each kind; the result is deterministic."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, IM_START, IM_END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_texts(per_kind), trainer)
    if core.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"expected {VOCAB_SIZE} tokens, got {core.get_vocab_size()}; raise --per-kind.")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=IM_END,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder to write the tokenizer files to.")] = TARGET_DIR,
    per_kind: Annotated[int, typer.Option(help="Conversations of each kind to learn the merges from.")] = 4000,
) -> None:
    """Build the tokenizer and save it."""
    tokenizer = build_tokenizer(per_kind)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    rich_print(f"{len(tokenizer)} tokens written to {out}")


if __name__ == "__main__":
    typer.run(main)
