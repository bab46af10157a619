"""Hidden states from servers give the draft that the target gives, and the target's layers are not loaded."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3ForCausalLM

from dflash_hf import DFlashConfig, DFlashDraftModel, load_draft
from dflash_hf.block.positions import build_target_layer_ids
from dflash_hf.data.openai_client import OpenAIClient
from dflash_hf.pair.vocabulary import load_vocabulary
from dflash_hf.target_model.parts import find_target
from dflash_hf.training import DFlashTrainer, DFlashTrainingArguments, served_features
from dflash_hf.training.collators import collate
from dflash_hf.training.example import Example
from dflash_hf.training.features import FeatureCache
from dflash_hf.training.served_features import ServedFeatures, layer_ids, read_file
from helpers.hidden_states_server import HiddenStatesServer, serving
from helpers.serving import function_of, installed
from helpers.source_tree import ROOT
from helpers.training_command import TOY, said, train

STAGES = "prepare,regenerate,run"
RECIPE = [
    *("--target", str(TOY / "target"), "--answers", "data", "--num-eval", "2", "--threads", "1"),
    *("--num-hidden-layers", "1", "--block-size", "4", "--num-anchors", "4", "--max-steps", "3"),
    *("--draft-options", '{"num_taps": 2}'),
    *("--per-device-train-batch-size", "4", "--stages", STAGES),
]


@pytest.fixture
def toy_server(tmp_path: Path) -> Generator[str]:
    """A server of the bundled target that stores what two taps of a fresh draft see."""
    target = AutoModelForCausalLM.from_pretrained(TOY / "target")
    taps = build_target_layer_ids(target.config.num_hidden_layers, 2)
    server = HiddenStatesServer(target, tmp_path, [layer + 1 for layer in taps])
    with serving(server) as url:
        yield url


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Conversations with answers."""
    path = tmp_path / "rows.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Compute {n} + {n}."},
                {"role": "assistant", "content": f"{n} + {n} = {2 * n}. The result is {2 * n}."},
            ]
        }
        for n in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_command_trains_the_same_draft(toy_server: str, rows: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    common = [*RECIPE, "--dataset", str(rows)]
    cache = ["--feature-cache", str(tmp_path / "served-features"), "--feature-server", toy_server]
    result = train(*common, *cache, "--output-dir", served)
    assert result.exit_code == 0, result.output
    assert list(tmp_path.glob("cmpl-*")) == []
    cache = ["--feature-cache", str(tmp_path / "features")]
    result = train(*common, *cache, "--output-dir", tmp_path / "whole")
    assert result.exit_code == 0, result.output
    ours = load_draft(served / "draft").state_dict()
    theirs = load_draft(tmp_path / "whole" / "draft").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    lengths = [
        json.loads((folder / "stages.json").read_text())["run"]["facts"]["acceptance_length"]
        for folder in (served, tmp_path / "whole")
    ]
    assert lengths[0] == lengths[1]


def test_float8_features_train_the_same_draft_and_are_compared(
    toy_server: str, rows: Path, tmp_path: Path
) -> None:
    """Of servers, whose features are evaluated too, as of the target; a run goes on with what it began with."""
    common = [*RECIPE, "--dataset", str(rows), "--feature-dtype", "float8"]
    served = [*common, "--feature-cache", str(tmp_path / "a"), "--feature-server", toy_server]
    result = train(*served, "--output-dir", tmp_path / "served")
    assert result.exit_code == 0, result.output
    whole = [*common, "--feature-cache", str(tmp_path / "b"), "--output-dir", tmp_path / "whole"]
    result = train(*whole)
    assert result.exit_code == 0, result.output
    ours = load_draft(tmp_path / "served" / "draft").state_dict()
    theirs = load_draft(tmp_path / "whole" / "draft").state_dict()
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    stages = json.loads((tmp_path / "served" / "stages.json").read_text())
    assert stages["run"]["facts"]["acceptance_length"] >= 1
    result = train(*whole, "--feature-dtype", "auto")
    assert result.exit_code == 2
    assert "feature_dtype was 'float8' and is 'auto'" in said(result)


def test_a_failing_server_is_asked_again(
    target: Qwen3ForCausalLM, make_draft: Any, examples: list[Example], tmp_path: Path
) -> None:
    config = make_draft().config
    server = HiddenStatesServer(target, tmp_path, layer_ids(config))
    server.failures = 2
    cache = FeatureCache(tmp_path / "features")
    found = find_target(target)
    with serving(server) as url:
        cache.write_served(found, config, examples, [OpenAIClient(url)])
        asked = server.num_requests
        cache.write_served(found, config, examples, [OpenAIClient(url)])
        assert server.num_requests == asked
    own = FeatureCache(tmp_path / "own")
    own.write(found, config, examples)
    batch = collate(examples)
    assert cache.read(examples, batch).taps.equal(own.read(examples, batch).taps)


def test_long_examples_are_named(
    target: Qwen3ForCausalLM, make_draft: Any, examples: list[Example], tmp_path: Path
) -> None:
    config = make_draft().config
    longest = max(len(example.input_ids) for example in examples)
    server = HiddenStatesServer(target, tmp_path, layer_ids(config), max_length=longest - 1)
    cache = FeatureCache(tmp_path / "features")
    with (
        serving(server) as url,
        pytest.raises(ValueError, match=r"expected the states of 3 examples, got 1 refusals"),
    ):
        cache.write_served(find_target(target), config, examples, [OpenAIClient(url)])
    assert sum(example in cache for example in examples) == 2


def test_states_that_float8_cannot_hold_are_asked_for_once(
    target: Qwen3ForCausalLM, make_draft: Any, examples: list[Example], tmp_path: Path
) -> None:
    config = make_draft().config
    others = {token for example in examples[1:] for token in example.input_ids}
    own = set(examples[0].input_ids) - others - set(served_features.SHORT_TEXT)
    with torch.no_grad():
        target.model.embed_tokens.weight[own.pop()] = float("nan")
    server = HiddenStatesServer(target, tmp_path, layer_ids(config))
    cache = FeatureCache(tmp_path / "features", "float8")
    message = r"the states of 3 examples, got 1 refusals \(.* finite in float8, got 'inf or nan'"
    with serving(server) as url, pytest.raises(ValueError, match=message):
        cache.write_served(find_target(target), config, examples, [OpenAIClient(url)])
    assert [example in cache for example in examples] == [False, True, True]
    assert server.num_requests == len(examples) + 1, "one more asks whether the server is well"


def test_other_states_are_refused(
    target: Qwen3ForCausalLM, make_draft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_draft().config
    server = HiddenStatesServer(target, tmp_path, [1])
    with serving(server) as url:
        served = ServedFeatures([OpenAIClient(url)], config, torch.float32)
        with pytest.raises(ValueError, match=r"expected hidden states of shape \(4, 2, 32\)"):
            served.check()
        reply = server.reply
        monkeypatch.setattr(server, "reply", lambda body: (200, {"choices": []}))
        with pytest.raises(ValueError, match="expected kv_transfer_params"):
            served.check()

        def elsewhere(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            place = {"hidden_states_path": str(tmp_path / "other" / "x.safetensors")}
            return 200, {"kv_transfer_params": place}

        monkeypatch.setattr(server, "reply", elsewhere)
        with pytest.raises(ValueError, match=r"expected the file .* run the training where"):
            served.check()
        other = {"prompt": [4, 3, 2, 1]}
        monkeypatch.setattr(server, "reply", lambda body: reply(other))
        with pytest.raises(ValueError, match="the token_ids that were sent"):
            served.check()
    with pytest.raises(ValueError, match="start it, and run this again"):
        served.check()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--stages", "run,bench"], "expected no bench among --stages with --feature-server"),
        (["--loss", "kl"], "expected --loss dpace or cross_entropy"),
        (["--labels", "target"], "expected --loss dpace or cross_entropy"),
        (["--packing-length", "64"], "expected no --packing-length"),
        (["--answers", "target"], "expected --server or --answers data"),
        (["--self-prompts", "4"], "expected no --self-prompts"),
        (["--feature-server", "localhost"], "expected a URL as --feature-server"),
    ],
)
def test_what_needs_layers_is_refused(
    words: list[str], sentence: str, rows: Path, tmp_path: Path
) -> None:
    given = [*RECIPE, "--dataset", str(rows), "--feature-server", "http://127.0.0.1:9"]
    given += ["--feature-cache", str(tmp_path / "features"), "--output-dir", str(tmp_path / "run")]
    result = train(*given, *words)
    assert result.exit_code == 2
    assert sentence in said(result)
    assert not (tmp_path / "run").exists()


def test_a_cache_folder_is_asked_for(rows: Path, tmp_path: Path) -> None:
    given = [*RECIPE, "--dataset", str(rows), "--feature-server", "http://127.0.0.1:9"]
    result = train(*given, "--output-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert "expected --feature-cache with --feature-server" in said(result)


def test_a_lock_that_is_never_let_go_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_features, "LONGEST_WRITE", 0.1)
    path = tmp_path / "x.safetensors"
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=r"expected a file of hidden states within 0 s"):
        read_file(path, "the server")
    os.close(lock)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_whole_models_config_says_what_is_tied(is_tied: bool, tmp_path: Path) -> None:
    source = TOY / "vision" / "target"
    whole = AutoModelForImageTextToText.from_pretrained(source)
    whole.config.tie_word_embeddings = is_tied
    whole.config.text_config.tie_word_embeddings = not is_tied
    if not is_tied:
        whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach() * 2)
    whole.save_pretrained(tmp_path)
    for file in source.glob("*"):
        if "token" in file.name or "processor" in file.name or "template" in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    model, _ = load_vocabulary(str(tmp_path))
    target = find_target(model)
    assert target.embedding.weight.equal(whole.get_input_embeddings().weight)
    assert target.head.weight.equal(whole.lm_head.weight)


def test_a_damaged_index_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    shutil.copytree(TOY / "target", tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors.index.json"
    file.write_text('{"weight_map": {}}')
    load_vocabulary(str(tmp_path / "target"))  # the whole file counts, as in Transformers
    whole = tmp_path / "target" / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"expected whole safetensors files in .*target"):
        load_vocabulary(str(tmp_path / "target"))
    whole.unlink()
    for text, message in (
        ("", "expected JSON in .*index.json, got something else"),
        ("[]", "expected a JSON object in .*index.json"),
        ('{"weight_map": {"lm_head.weight": 3}}', "expected weight_map from names to files in "),
        ('{"weight_map": {}}', "expected one weight model.embed_tokens.weight in .*target, got"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_vocabulary(str(tmp_path / "target"))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("shard_size", ["10KB", "5GB"])
def test_the_vocabulary_alone_is_loaded(is_tied: bool, shard_size: str, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(TOY / "target")
    if not is_tied:
        whole.config.tie_word_embeddings = False
        whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach() * 2)
    whole.save_pretrained(tmp_path, max_shard_size=shard_size)
    for file in (TOY / "target").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model, processor = load_vocabulary(str(tmp_path))
    target = find_target(model)
    assert target.embedding.weight.equal(whole.model.embed_tokens.weight)
    assert target.head.weight.equal(whole.lm_head.weight)
    assert (target.head.weight is target.embedding.weight) == is_tied
    assert all(weight.is_meta for weight in model.model.layers.parameters())
    assert not target.has_layers
    assert find_target(whole).has_layers
    assert processor("text")["input_ids"]
    assert model.generation_config.eos_token_id == whole.generation_config.eos_token_id


def test_features_that_are_missing_are_named(
    make_draft: Any, examples: list[Example], tmp_path: Path
) -> None:
    model, _ = load_vocabulary(str(TOY / "target"))
    draft = DFlashDraftModel.from_target(model, num_hidden_layers=1, block_size=4, mask_token_id=3)
    options: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "max_steps": 1}
    args = DFlashTrainingArguments(**options)
    with pytest.raises(ValueError, match="expected a feature_cache"):
        DFlashTrainer(model=draft, target=model, args=args, train_dataset=examples)
    args = DFlashTrainingArguments(**options, feature_cache=str(tmp_path / "features"))
    trainer = DFlashTrainer(model=draft, target=model, args=args, train_dataset=examples)
    with pytest.raises(ValueError, match="expected features of every example"):
        trainer.train()


def test_the_guides_command_names_the_layers() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (speculative,) = re.findall(r"--speculative-config '(.*)'", page)
    fields = json.loads(speculative)["draft_model_config"]["hf_config"]
    # Qwen3-32B has 64 layers, and a fresh draft five taps.
    config = DFlashConfig(target_layer_ids=build_target_layer_ids(64, 5), num_target_layers=64)
    assert fields == {"eagle_aux_hidden_state_layer_ids": layer_ids(config)}
    (transfer,) = re.findall(r"--kv-transfer-config '(.*)'", page)
    assert json.loads(transfer)["kv_connector"] == "ExampleHiddenStatesConnector"


def test_vllms_own_code_writes_and_reads_the_files(tmp_path: Path) -> None:
    """Its connector's functions, from its wheel; see tests/checkpoints/test_serving_engines.py."""
    if not installed("vllm"):
        pytest.skip("no vllm: pip install --no-deps --target build/engines vllm")
    file = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
    write = function_of(file, "_write_tensors", os=os, save_file=save_file)
    read = function_of(file, "load_hidden_states", fcntl=fcntl, load_file=load_file)
    states = {"hidden_states": torch.randn(4, 2, 8), "token_ids": torch.arange(1, 5)}
    path = tmp_path / "theirs.safetensors"
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    event = SimpleNamespace(synchronize=lambda: time.sleep(0.1))
    writer = threading.Thread(target=write, args=(states, event, str(path), lock))
    writer.start()
    ours = read_file(path, "the server")
    writer.join()
    assert all(ours[name].equal(value) for name, value in states.items())
    assert list(tmp_path.iterdir()) == []
    # And theirs reads what the stand-in of these tests writes
    target = AutoModelForCausalLM.from_pretrained(TOY / "target")
    _, reply = HiddenStatesServer(target, tmp_path, [1, 2]).reply({"prompt": [1, 2, 3, 4]})
    theirs = read(reply["kv_transfer_params"]["hidden_states_path"])
    assert theirs["token_ids"].tolist() == [1, 2, 3, 4]
    assert theirs["hidden_states"].shape == (4, 2, target.config.hidden_size)
