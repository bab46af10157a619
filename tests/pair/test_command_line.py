"""The command line on the bundled pair: the answer alone on stdout, and one sentence with a status for bad input."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

import dflash_hf
from dflash_hf.bench import run as bench_run
from dflash_hf.cli.generate import read_prompt
from dflash_hf.cli.main import app
from dflash_hf.cli.pair import ABOUT
from dflash_hf.generation_config import DFlashGenerationConfig
from dflash_hf.pair import loading as pair_loading
from dflash_hf.pair.loading import load_pair, load_weights, loaded
from helpers.forked_python import start
from helpers.source_tree import ROOT

TOY = ROOT / "demos" / "toy"
PROMPT = "Compute 41 + 80 - 99 + 14."


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def words(text: str) -> str:
    return " ".join(text.split())


def test_version_is_in_one_place() -> None:
    assert run("--version").stdout == f"dflash-hf {dflash_hf.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", dflash_hf.__version__)
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[tool.")[0]


# ---- what goes wrong: never a stack trace, never status 1

BAD: dict[str, tuple[list[object], str]] = {
    "dtype": (
        ["--dtype", "float99"],
        "expected one of auto, float32, .* as --dtype, got 'float99'",
    ),
    "whole numbers": (
        ["--dtype", "int8"],
        "expected one of auto, float32, .* as --dtype, got 'int8'",
    ),
    "no such device": (["--device", "nonsense"], "expected cpu, .* as --device, got 'nonsense'"),
    "no data": (
        ["--device", "meta"],
        "expected an accelerator of this machine as --device, got 'meta'",
    ),
    "seed": (["--seed", 2**70], "--seed"),
    "negative seed": (["--seed", -1], "--seed"),
    "seed of sampling": (["--seed", "x", "--temperature", "1"], "--seed"),
    "tokens": (["--max-new-tokens", 10**30], "--max-new-tokens"),
    "width": (
        ["--verify-width", "x"],
        "expected a whole number or auto as --verify-width, got 'x'",
    ),
    "wide": (["--verify-width", "99"], "expected verify_width between 1 and 16"),
    "block": (["--block-size", "0"], "expected a number of tokens, at least 1, as block_size"),
    "proposal": (["--proposal", "x"], "expected proposal in"),
    "engine": (["--engine", "x"], "expected engine in"),
    "raw": (["--raw", "--system", "x"], "expected --raw alone"),
    "template": (
        ["--chat-template-kwargs", "[1]"],
        "expected a JSON object as --chat-template-kwargs",
    ),
    "no option of a template": (
        ["--chat-template-kwargs", '{"template": 1}'],
        "expected options of the chat template, got 'template'",
    ),
    "no option of a template either": (
        ["--chat-template-kwargs", '{"tokenize": false}'],
        "expected options of the chat template, got 'tokenize'",
    ),
    "system": (["--system", "a\udcff"], "expected UTF-8 as --system"),
    "two prompts": (["--file", "x"], "expected one prompt, got an argument and --file"),
    "target": (
        ["--target", "/nowhere", "--draft", str(TOY / "draft")],
        "expected a folder or a Hub id as --target",
    ),
    "sampled": (
        ["--compare", "--temperature", "1", "--proposal", "sample"],
        "expected proposal 'shared_noise' or 'argmax' to compare",
    ),
}


def assert_refused(result: Result, message: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert re.search(message, words(result.stderr)), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_sentence(name: str) -> None:
    arguments, message = BAD[name]
    assert_refused(run("generate", PROMPT, *arguments), message)


def test_options_of_a_template_may_have_our_parameters_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    apply = PreTrainedTokenizerBase.apply_chat_template

    def noted(tokenizer: Any, conversation: Any, **kwargs: Any) -> Any:
        given.append(kwargs)
        return apply(tokenizer, conversation, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", noted)
    options = {"device": "a", "processor": "b", "prompt": "c", "prompts": "d"}
    asked = ("generate", PROMPT, "--max-new-tokens", 1, "--chat-template-kwargs")
    result = run(*asked, json.dumps(options))
    assert result.exit_code == 0, result.stderr
    assert given
    for kwargs in given:
        assert {name: kwargs.get(name) for name in options} == options


def test_an_accelerator_that_is_not_here() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert_refused(
        run("generate", PROMPT, "--device", "cuda"), "got 'cuda', and it has none; pass cpu or auto"
    )


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate", "--temperature"),
        ("generate", "--top-p"),
        ("chat", "--temperature"),
        ("serve", "--kept-gib"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(command: str, option: str, value: str) -> None:
    assert_refused(run(command, option, value), option)


@pytest.mark.parametrize("command", ["doctor", "demo"])
def test_other_commands_refuse_a_dtype_too(command: str) -> None:
    assert_refused(run(command, "--dtype", "float99"), "expected one of auto, float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pair", "nobody"], "expected --pair among text, vision, hybrid, smollm2, got 'nobody'"),
        (["--pair", "text", "--draft", "x"], "expected --pair, or --target and --draft, got both"),
        (["--pair", "smollm2"], "expected SmolLM2 in .*; run `make real` first"),
    ],
)
def test_pairs_that_are_none(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_hf.cli.pair.CLONE", tmp_path)  # where nothing has been fetched
    assert_refused(run("chat", *arguments), message)


@pytest.mark.parametrize("command", ["generate", "chat", "tune", "serve", "doctor"])
def test_a_target_without_a_draft_is_refused_at_once(command: str) -> None:
    given = [PROMPT] if command == "generate" else []
    message = "expected --draft beside --target, .*`dflash-hf drafts --target org/x` lists"
    assert_refused(run(command, *given, "--target", "org/x"), message)


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def without_tokenizer(folder: Path) -> None:
    for file in (*folder.glob("*token*"), *folder.glob("*template*")):
        file.unlink()


def with_bytes(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def with_config(**fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def without_weight(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


def without_a_shard(folder: Path) -> None:
    """Leaves one of two shards out of the index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / shard, {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(part, shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_folder(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


UNKNOWN = "expected a model that Transformers .* knows in .*target, got the model_type"
SILENT = (
    "expected a causal language model, or one of images and text, in .*target, got the model_type"
)
SETTINGS = "generation_config.json"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (
        cut,
        r"expected weights of a model in .*, got files that do not load \(SafetensorError",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "no file named model.safetensors",
    ),
    "no tokenizer": (without_tokenizer, "expected a tokenizer in .*, got none with a vocabulary"),
    "no tokenizer.json": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "half a tokenizer": (with_bytes("tokenizer.json", b"{}"), "expected a tokenizer of a model in"),
    "tokenizer_config": (
        with_bytes("tokenizer_config.json", b"["),
        r"expected a tokenizer of a model in .*, got files that do not load \(JSONDecodeError",
    ),
    "no UTF-8": (
        with_bytes("tokenizer.json", b'{"\xff": 1}'),
        r"expected a tokenizer of a model in .*, got files that do not load \(UnicodeDecodeError",
    ),
    "another file as a template": (
        with_bytes("chat_template.jinja", b"\x89PNG"),
        r"expected a tokenizer of a model in .*, got files that do not load \(UnicodeDecodeError",
    ),
    "template": (
        with_bytes("chat_template.jinja", b"{% for"),
        "expected a conversation that the chat template takes",
    ),
    "empty generation_config": (
        with_bytes(SETTINGS, b""),
        f"expected JSON in .*target/{SETTINGS}, got something else .*; download it again",
    ),
    "list as a generation_config": (
        with_bytes(SETTINGS, b"[1]"),
        rf"expected a JSON object in .*target/{SETTINGS}, got \[1\]; download it again",
    ),
    "folder as a generation_config": (
        with_folder(SETTINGS),
        f"expected a file .*target/{SETTINGS}, got a folder; put the file there",
    ),
    "folder as weights": (
        with_folder("model.safetensors"),
        "expected weights of a model in .*, or correct model.safetensors, which is not whole",
    ),
    "a weight that is missing": (
        without_weight("model.norm.weight"),
        "expected all weights of a Qwen3ForCausalLM in .*target, got none for model.norm.weight; ",
    ),
    "no embedding": (
        without_weight("model.embed_tokens.weight"),
        "expected all weights of a .* in .*target, got none for .*model.embed_tokens.weight; ",
    ),
    "a shard that the index leaves out": (
        without_a_shard,
        "expected all weights of a .*, got none for .* more; download it again, or correct its index",
    ),
    "unknown model_type": (
        with_config(model_type="qwen99"),
        f"{UNKNOWN} 'qwen99'; update Transformers, or correct config.json$",
    ),
    "number as a model_type": (with_config(model_type=3), f"{UNKNOWN} 3; update"),
    "list as a model_type": (with_config(model_type=["qwen3"]), rf"{UNKNOWN} \['qwen3'\]; update"),
    "a model that only sees": (
        with_config(model_type="vit"),
        f"{SILENT} 'vit'; give the folder of such a model$",
    ),
    "config": (with_bytes("config.json", b"\xff\xfe\x00"), "not a valid JSON"),
    "no model_type": (with_bytes("config.json", b"{}"), "model_type"),
    "type": (with_config(hidden_size="x"), "expected a config of a model in .*hidden_size"),
    "depth": (
        with_config(num_hidden_layers=3),
        "expected a config of a model in .*num_hidden_layers",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_targets_are_one_sentence(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    shutil.copytree(TOY / "target", tmp_path / "target")
    damage(tmp_path / "target")
    pair = ("--target", tmp_path / "target", "--draft", TOY / "draft")
    assert_refused(run("generate", PROMPT, *pair), message)


def test_a_folder_as_the_weights_of_a_draft_is_one_sentence(tmp_path: Path) -> None:
    shutil.copytree(TOY / "draft", tmp_path / "draft")
    with_folder("model.safetensors")(tmp_path / "draft")
    message = "expected a file .*draft/model.safetensors, got a folder; put the file there$"
    assert_refused(run("generate", PROMPT, "--draft", tmp_path / "draft"), message)
    assert_refused(run("inspect", tmp_path / "draft"), message)


def test_a_target_that_only_lends_its_weights_is_whole_too(tmp_path: Path) -> None:
    shutil.copytree(TOY / "target", tmp_path / "target")
    without_weight("model.norm.weight")(tmp_path / "target")
    out = tmp_path / "out"
    result = run("convert", TOY / "draft", out, "--to", "deepspec", "--target", tmp_path / "target")
    assert_refused(result, "expected all weights of a .*, got none for model.norm.weight; ")
    assert not out.exists()


@pytest.mark.parametrize("command", ["a pair", "bench"])
def test_a_draft_is_on_one_device_also_if_its_target_is_spread(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device map of "auto" lays even a small draft on all GPUs, and a draft on several is refused."""
    places: list[Any] = []
    target: Any = torch.nn.Linear(1, 1)
    target.dtype = torch.float32
    processor = SimpleNamespace(pad_token="", chat_template=None, tokenizer=SimpleNamespace())
    settings: Any = SimpleNamespace(
        target="org/x",
        draft="org/draft",
        dtype=("auto",),
        methods=("dflash",),
        assistant=None,
        template_options={},
        system=None,
    )
    module = pair_loading if command == "a pair" else bench_run
    monkeypatch.setattr(module, "load_target", lambda *_: (target, processor))
    monkeypatch.setattr(bench_run, "tokenizer_of", lambda _: processor)
    monkeypatch.setattr(
        dflash_hf.DFlashDraftModel,
        "from_pretrained",
        lambda *_, dtype, device_map: places.append(device_map),
    )
    if command == "a pair":
        load_pair("org/x", "org/draft")
    else:
        bench_run._load_models(settings, "auto")
    assert places == [{"": torch.device("cpu")}]


def test_quantised_weights_may_come_without_what_their_library_makes() -> None:
    model = SimpleNamespace(hf_quantizer=object())
    missing = {"layers.0.mlp.weight_zero_point"}
    model_class = SimpleNamespace(
        from_pretrained=lambda place, output_loading_info: (model, {"missing_keys": missing})
    )
    assert load_weights(model_class, "place") is model
    missing.add("norm.weight")
    with pytest.raises(ValueError, match=r"in place, got none for norm\.weight; "):
        load_weights(model_class, "place")


def test_a_tokenizer_needs_no_config(tmp_path: Path) -> None:
    shutil.copytree(TOY / "target", tmp_path / "target")
    (tmp_path / "target" / "tokenizer_config.json").unlink()
    result = run("generate", PROMPT, "--target", tmp_path / "target", "--draft", TOY / "draft")
    assert (result.exit_code, result.stdout) == (0, run("generate", PROMPT).stdout)


def in_shards(change: Callable[[dict[str, Any], Path], object]) -> Callable[[Path], object]:
    """Damage of a target whose weights are in one shard, with an index."""

    def damage(folder: Path) -> None:
        shard = folder / "model-00001-of-00001.safetensors"
        (folder / "model.safetensors").rename(shard)
        with safe_open(shard, framework="pt") as opened:
            names = dict.fromkeys(opened.keys(), shard.name)
        index: dict[str, Any] = {"metadata": {}, "weight_map": names}
        change(index, shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


NO_OBJECT = "; download it again, or correct {}, which is no JSON object"
NOT_WHOLE = "; download it again, or correct {}, which is not whole"
MISSING = "; download it again, or correct {}, which is missing"
SHARD = "model-00001-of-00001.safetensors"
# What is damaged -> of which part, and what is said of which file
NAMED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "empty config": (with_bytes("config.json", b""), "config", NO_OBJECT.format("config.json")),
    "cut config": (
        with_bytes("config.json", b'{"model_type": "qw'),
        "config",
        NO_OBJECT.format("config.json"),
    ),
    "list as a config": (
        with_bytes("config.json", b"[1]"),
        "config",
        NO_OBJECT.format("config.json"),
    ),
    "number as a config": (
        with_bytes("config.json", b"3"),
        "config",
        NO_OBJECT.format("config.json"),
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "config",
        MISSING.format("config.json"),
    ),
    "empty tokenizer": (
        with_bytes("tokenizer.json", b""),
        "tokenizer",
        NO_OBJECT.format("tokenizer.json"),
    ),
    "cut tokenizer": (
        with_bytes("tokenizer.json", b'{"version": "1.0", '),
        "tokenizer",
        NO_OBJECT.format("tokenizer.json"),
    ),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "tokenizer",
        MISSING.format("tokenizer.json"),
    ),
    "list as a tokenizer_config": (
        with_bytes("tokenizer_config.json", b"[]"),
        "tokenizer",
        NO_OBJECT.format("tokenizer_config.json"),
    ),
    "empty weights": (
        with_bytes("model.safetensors", b""),
        "weights",
        NOT_WHOLE.format("model.safetensors"),
    ),
    "cut weights": (cut, "weights", NOT_WHOLE.format("model.safetensors")),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "weights",
        "no file named model.safetensors, .*; download it again",
    ),
    "list as an index": (
        lambda folder: (
            in_shards(lambda index, shard: None)(folder),
            with_bytes("model.safetensors.index.json", b"[]")(folder),
        ),
        "weights",
        NO_OBJECT.format("model.safetensors.index.json"),
    ),
    "no shard": (
        in_shards(lambda index, shard: shard.unlink()),
        "weights",
        f"FileNotFoundError: .*{SHARD}.*; download it again",
    ),
    "empty shard": (
        in_shards(lambda index, shard: shard.write_bytes(b"")),
        "weights",
        NOT_WHOLE.format(SHARD),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_of_a_damaged_target_the_file_is_named(name: str, tmp_path: Path) -> None:
    damage, part, said = NAMED[name]
    shutil.copytree(TOY / "target", tmp_path / "target")
    damage(tmp_path / "target")
    article = "" if part == "weights" else "a "
    message = f"expected {article}{part} of a model in .*, got files that do not load .*{said}"
    pair = ("--target", tmp_path / "target", "--draft", TOY / "draft")
    assert_refused(run("doctor", *pair), message)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        OSError(12, "Cannot allocate memory"),
        torch.distributed.DistBackendError("NCCL error"),
        ValueError("The model contains custom code; pass trust_remote_code=True"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_are_no_files_fault_stay_as_they_are(error: Exception, tmp_path: Path) -> None:
    def fail() -> None:
        raise error

    (tmp_path / "tokenizer.model").write_bytes(b"words")
    with pytest.raises(type(error)) as found:
        loaded("a tokenizer", str(tmp_path), fail)
    assert found.value is error


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_every_command_names_the_damaged_file(command: str, tmp_path: Path) -> None:
    shutil.copytree(TOY / "target", tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text("")
    given = [PROMPT] if command == "generate" else []
    result = run(command, *given, "--target", tmp_path / "target", "--draft", TOY / "draft")
    assert_refused(result, NO_OBJECT.format("config.json"))


def test_without_pillow_a_vision_target_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    vision = TOY / "vision"
    result = run("generate", PROMPT, "--target", vision / "target", "--draft", vision / "draft")
    assert result.exit_code == 2
    assert "expected Pillow for images, got no module PIL; pip install 'dflash-hf[vlm]'" in words(
        result.stderr
    )


def test_without_pillow_the_demo_leaves_the_vision_pair_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name in ("target", "draft", "vision"):
        (tmp_path / name).symlink_to(TOY / name)
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "Hello", "kind": "dialogue"}))
    monkeypatch.setitem(sys.modules, "PIL", None)
    done = run("demo", "--pair", tmp_path, "--max-new-tokens", 4, "--json")
    assert done.exit_code == 0, done.output
    assert [row["kind"] for row in json.loads(done.stdout)["rows"]] == ["dialogue"]
    sentence = "The pair for images is left out, because there is no Pillow"
    assert f"{sentence}; pip install 'dflash-hf[vlm]'" in caplog.text


def test_what_nobody_foresaw_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("some\nthing")

    monkeypatch.setattr("dflash_hf.cli.generate.load_pair", fail)
    result = run("generate", PROMPT)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "Error: 'some\\nthing' (KeyError in generate.py:" in words(result.stderr)
    assert "Traceback" not in result.stderr
    result = run("--traceback", "generate", PROMPT)
    assert result.exit_code == 3
    assert "Traceback (most recent call last)" in result.stderr


def test_interrupts_and_closed_pipes_have_their_own_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_hf.cli.generate.load_pair", interrupt)
    assert run("generate", PROMPT).exit_code == 130
    pipe, stderr = tmp_path / "pipe", tmp_path / "stderr"
    os.mkfifo(pipe)
    program = ["-m", "dflash_hf.cli", "generate", "Count from 1 to 90."]
    writer = start(program, os.environ, pipe, stderr)
    try:
        read = subprocess.run(["head", "-c", "1", pipe], capture_output=True, check=True)
        status = writer.wait(timeout=280)
    finally:
        writer.kill()
    said = stderr.read_text()
    assert (len(read.stdout), status) == (1, 141), said
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


PROMPTS: dict[str, tuple[bytes, str]] = {
    "other bytes": (b"a\xff", "expected UTF-8 as the prompt in stdin, got other bytes"),
    "nothing": (b"", "expected a text as the prompt in stdin, got an empty one"),
    "a surrogate": (b"\xed\xa0\x80", "expected UTF-8 as the prompt in stdin"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_that_are_none(name: str, tmp_path: Path) -> None:
    content, message = PROMPTS[name]
    assert_refused(run("generate", "-", stdin=content), message)
    assert_refused(run("generate", stdin=content), message)
    (tmp_path / "p").write_bytes(content)
    assert_refused(run("generate", "--file", tmp_path / "p"), message.replace("stdin", ".*"))
    assert_refused(
        run("generate", "--file", tmp_path / "none"), "expected a file with the prompt as --file"
    )
    assert_refused(run("generate", "a\udcff"), "expected UTF-8 as the prompt, got other bytes")


def test_the_page_takes_no_ipv6_address() -> None:
    assert_refused(
        run("chat", "--web", "--host", "::1"),
        "expected a name or an IPv4 address as --host for --web, got '::1'",
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_hf.cli.chat.load_pair", lambda *_: pytest.fail("a pair was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("chat", "--web", "--pair", "text", "--host", host, "--port", port)
    assert_refused(
        done, f"expected a place to listen, got .*:{port} .*; pass another --host or --port"
    )


def test_without_gradio_the_page_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dflash_hf.cli.chat.load_pair", lambda *_: pytest.fail("a pair was loaded"))
    for name in ("dflash_hf.chat.app", "dflash_hf.chat.page"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = run("chat", "--web", "--pair", "text")
    assert_refused(
        done, r"expected Gradio for --web, got no gradio; pip install 'dflash-hf\[demo\]'"
    )


# ---- what goes right


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\xef\xbb\xbf" + PROMPT.encode())
    assert read_prompt(None, tmp_path / "p") == PROMPT


def test_kinds_of_prompts_may_have_brackets(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).symlink_to(TOY / name)
    rows = [{"prompt": "Hello", "kind": kind} for kind in ("[/math]", "code [python]")]
    (tmp_path / "held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = run("demo", "--pair", tmp_path, "--max-new-tokens", 4)
    assert done.exit_code == 0, done.output
    assert "[/math] (1)" in words(done.output)
    assert "code [python] (1)" in words(done.output)


@pytest.mark.parametrize("columns", [60, pytest.param(80, marks=pytest.mark.slow)])
def test_tables_fit_the_terminal(columns: int, tmp_path: Path) -> None:
    options = {"env": {"COLUMNS": str(columns)}}
    for name in ("target", "draft", "held_out.jsonl"):  # without the pair for images
        (tmp_path / name).symlink_to(TOY / name)
    asked = ["demo", "--pair", str(tmp_path), "--per-kind", "1", "--max-new-tokens", "6"]
    demo = CliRunner().invoke(app, asked, **options)
    short = ["--num-prompts", "1", "--max-new-tokens", "16"]
    doctor = CliRunner().invoke(app, ["doctor", *short], **options)
    table = demo.stdout.split("answers with and without the draft")[1]
    said = words(doctor.stdout)
    assert demo.exit_code == 0, demo.stderr
    assert doctor.exit_code == (" 0 findings." not in said), doctor.stderr
    for shown in (table, doctor.stdout):
        assert max(map(len, shown.splitlines())) <= columns
        assert "…" not in shown
    assert re.search(
        r"structured *(\(1\))? +yes +6 +\d+ +\d+\.\d\d( +\d+\.\d\d){2} +\d+\.\d\dx", table
    ), table
    assert re.search(r"\d\.\d\dx the speed of this package without the draft", words(table)), table
    assert re.search(r"all \(\d+\) +yes ", table), table
    assert "(in generate, on 1 prompt and 16 tokens of answers)" in said
    assert "compare these figures only with each other" in said


def test_the_answer_is_all_that_stands_on_stdout(tmp_path: Path) -> None:
    result = run("generate", PROMPT)
    assert result.exit_code == 0, result.stderr
    assert ABOUT["text"] in words(result.stderr), "who asks a toy is told so"
    said = re.search(
        r"(\d+) tokens in [\d.]+ s \([\d.]+/s\), (\d+) forwards, acceptance length [\d.]+$",
        words(result.stderr),
    )
    assert said, result.stderr
    assert int(said[2]) < int(said[1])
    (tmp_path / "p").write_text(f"{PROMPT}\n")
    assert run("generate", "--file", tmp_path / "p").stdout == result.stdout
    assert run("generate", stdin=f"{PROMPT}\r\n".encode()).stdout == result.stdout
    assert run("generate", "-", stdin=PROMPT.encode()).stdout == result.stdout
    row = json.loads(run("generate", PROMPT, "--json").stdout)
    assert row["text"] == result.stdout.strip("\n")
    assert (row["num_tokens"], row["num_target_forwards"]) == (int(said[1]), int(said[2]))
    # The draft's own time is one of six parts of the call's.
    assert 0 < row["draft_seconds"] < row["total_seconds"] <= row["seconds"]
    assert "plain_seconds" not in row


def test_options_reach_prompt_template_and_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def look(target: Any, draft: Any, processor: Any, asked: Any, **given: Any) -> None:
        names = ("block_size", "verify_width", "proposal", "engine", "num_assistant_tokens")
        seen.update(
            asked=asked, **given, **{name: getattr(draft.generation_config, name) for name in names}
        )
        raise ValueError("enough")

    monkeypatch.setattr("dflash_hf.pair.answers.answer", look)
    options = [
        "--block-size",
        8,
        "--verify-width",
        "auto",
        "--proposal",
        "shared_noise",
        "--engine",
        "eager",
    ]
    template = ["--no-thinking", "--chat-template-kwargs", '{"level": 3}', "--system", "Be short."]
    result = run("generate", PROMPT, *options, *template, "--temperature", 0.5, "--top-k", 7)
    assert "the chat template has no enable_thinking" in result.stderr
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": PROMPT}]
    assert (seen["asked"], seen["encoding"]) == (
        turns,
        {"template": True, "enable_thinking": False, "level": 3},
    )
    assert (seen["block_size"], seen["verify_width"]) == (8, "auto")
    assert (seen["proposal"], seen["engine"]) == ("shared_noise", "eager")
    assert (seen["temperature"], seen["top_k"], seen["do_sample"]) == (0.5, 7, True)
    run("generate", PROMPT, "--raw")
    assert (seen["asked"], seen["encoding"]) == (PROMPT, {"template": False})
    # A stored option that is the same under another name
    pair = ("--target", TOY / "target", "--draft", tmp_path / "draft")
    shutil.copytree(TOY / "draft", tmp_path / "draft")
    DFlashGenerationConfig(num_assistant_tokens=4).save_pretrained(tmp_path / "draft")
    run("generate", PROMPT, *pair)
    assert (seen["verify_width"], seen["num_assistant_tokens"]) == (None, 4)
    run("generate", PROMPT, *pair, "--verify-width", 3)
    assert (seen["verify_width"], seen["num_assistant_tokens"]) == (3, None)


def noting(order: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        order.append(name)
        return call(*args, **kwargs)

    return noted


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.7", "--seed", "5")])
def test_the_drafted_answer_is_first_and_compared_on_request(
    sampling: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    harness = importlib.import_module("dflash_hf.pair.answers")
    for name in ("answer", "compare_with_plain"):
        monkeypatch.setattr(harness, name, noting(order, name, getattr(harness, name)))
    asked = ("generate", PROMPT, "--max-new-tokens", "24", *sampling)
    alone = run(*asked)
    order.clear()
    result = run(*asked, "--compare")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == alone.stdout
    assert re.search(r"\byes\b +\d", result.stderr), result.stderr
    # Plain `generate` draws other tokens, so that it does not run where one is sampled.
    assert ("plain" in result.stderr) == (not sampling)
    assert "the speed of this package without the draft" in words(result.stderr)
    assert order[-2:] == ["answer", "compare_with_plain"]
    row = json.loads(run(*asked, "--compare", "--json").stdout)
    assert row["identical"] is True
    if sampling:
        assert row["ratio"] is row["plain_seconds"] is None
    else:
        assert row["ratio"] == row["plain_seconds"] / row["seconds"]
    assert row["draft_ratio"] == row["undrafted_seconds"] / row["seconds"]
    assert row["draft_seconds"] < row["seconds"]
