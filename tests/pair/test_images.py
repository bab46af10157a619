"""Prompts with pictures in the commands, the harness and the doctor, on pairs of random weights."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration
from typer.testing import CliRunner, Result

from dflash_hf import DFlashDraftModel
from dflash_hf.cli.demo import read_prompts
from dflash_hf.cli.main import app
from dflash_hf.data.prompt_files import image_names
from dflash_hf.data.prompt_files import read_prompts as read_doctor_prompts
from dflash_hf.doctor.diagnosis import diagnose, write_answers
from dflash_hf.doctor.probe import Probe, variant
from dflash_hf.pair.answers import answer, compare_with_plain, encode_prompt
from dflash_hf.pair.loading import load_pair
from dflash_hf.target_model.parts import find_target
from helpers.processors import PARTS_ONLY, picture
from helpers.vision_pair import KINDS, write_vision_pair
from helpers.whole_blocks import use_whole_blocks

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "demos" / "toy"
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that is right now and then."""
    return write_vision_pair(tmp_path_factory.mktemp("random") / "pair")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that is always right."""
    return write_vision_pair(tmp_path_factory.mktemp("known") / "pair", knows=True)


@cache
def loaded(folder: Path) -> tuple[Any, DFlashDraftModel, Any]:
    return load_pair(str(folder / "target"), str(folder / "draft"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def pair_options(folder: Path) -> list[str]:
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


def last_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_a_target_is_loaded_as_its_config_says(folder: Path) -> None:
    target, _, processor = loaded(folder)
    assert isinstance(target, Qwen3VLForConditionalGeneration)
    assert isinstance(processor.tokenizer, PreTrainedTokenizerBase)
    target, _, processor = load_pair(str(TOY / "target"), str(TOY / "draft"))
    assert isinstance(target, Qwen3ForCausalLM)
    assert isinstance(processor, PreTrainedTokenizerBase)


def test_paths_of_images_are_relative_to_the_file(folder: Path) -> None:
    for prompts in (
        [row["messages"] for row in read_prompts(folder / "held_out.jsonl", 3)],
        read_doctor_prompts(folder / "held_out.jsonl"),
    ):
        assert [len(image_names(prompt)) for prompt in prompts] == [
            len(s) for k in KINDS.values() for s in k
        ]
        part = prompts[3][0]["content"][1]
        assert part == {"type": "image", "path": str(folder / "pictures" / "004.png")}
        assert image_names(prompts[3]) == ["003.png", "004.png"]


def test_prompts_are_encoded_as_the_processor_does(folder: Path) -> None:
    target, _, processor = loaded(folder)
    for row in read_prompts(folder / "held_out.jsonl", 3):
        messages = row["messages"]
        inputs = encode_prompt(processor, messages, target.device)
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        content = messages[0]["content"]
        pictures = (
            []
            if isinstance(content, str)
            else [Image.open(p["path"]) for p in content if p["type"] == "image"]
        )
        expected = processor(text=text, images=pictures or None, return_tensors="pt")
        assert inputs.keys() == expected.keys()
        assert all(torch.equal(inputs[name], expected[name]) for name in inputs)
        assert ("pixel_values" in inputs) == bool(pictures)
    spoken = encode_prompt(processor, "Hello", target.device)
    turn = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert torch.equal(
        spoken["input_ids"], encode_prompt(processor, turn, target.device)["input_ids"]
    )


@pytest.mark.parametrize("template", PARTS_ONLY)
def test_texts_reach_templates_that_read_only_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    _, _, processor = loaded(folder)
    monkeypatch.setattr(processor, "chat_template", template)
    picture = {"type": "image", "path": str(folder / "pictures" / "000.png")}
    seen = [{"type": "text", "text": "See:"}, picture]
    says = ({"role": "system", "content": "Be brief."}, {"role": "assistant", "content": ""})
    turns = [{"role": "user", "content": "2+2?"}, says[1], {"role": "user", "content": seen}]
    for prompt, words in (
        ("2+2?", ["2+2?"]),
        ([says[0], *turns], ["system\nBe brief.", "user\n2+2?", "See:"]),
    ):
        inputs = encode_prompt(processor, prompt, torch.device("cpu"))
        text = processor.tokenizer.decode(inputs["input_ids"][0])
        assert all(word in text for word in words), text
    assert turns[0] == {"role": "user", "content": "2+2?"}


def test_images_need_a_processor_a_template_and_a_good_file(folder: Path, tmp_path: Path) -> None:
    target, _, processor = loaded(folder)
    prompt = read_prompts(folder / "held_out.jsonl", 1)[0]["messages"]
    with pytest.raises(ValueError, match=r"expected a processor .* got \w+; leave"):
        encode_prompt(processor.tokenizer, prompt, target.device)
    with pytest.raises(ValueError, match="without the template; leave the images out"):
        encode_prompt(processor, prompt, target.device, template=False)
    whole = (folder / "pictures" / "000.png").read_bytes()
    for content in (b"no picture", whole[: len(whole) // 2], b""):
        (tmp_path / "bad.png").write_bytes(content)
        prompt[0]["content"][0]["path"] = str(tmp_path / "bad.png")
        with pytest.raises(ValueError, match=r"expected images that can be read, got bad.png"):
            encode_prompt(processor, prompt, target.device)


def test_answers_are_compared_and_say_what_they_are_about(folder: Path, known: Path) -> None:
    for place, least in ((folder, 1.0), (known, 5.0)):
        for row in read_prompts(place / "held_out.jsonl", 2):
            target, default, processor = loaded(place)
            draft = variant(default, {})
            use_whole_blocks(draft)
            settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
            answered = answer(target, draft, processor, row["messages"], **settings)
            result = compare_with_plain(target, draft, answered, **settings)
            assert result.identical
            assert result.num_tokens == NEW
            assert result.stats.acceptance_length >= least
            assert list(result.images) == image_names(row["messages"])
            assert result.to_dict()["images"] == list(result.images)


def test_the_demo_names_the_images(known: Path) -> None:
    result = run("demo", "--pair", str(known), "--per-kind", "1", "--max-new-tokens", str(NEW))
    assert result.exit_code == 0, result.output
    assert "[000.png] Question 0 about count?" in result.stdout
    assert all(f"{kind} (1)" in result.stdout for kind in KINDS)
    rows = last_json(run("demo", "--pair", str(known), "--max-new-tokens", "4", "--json"))["rows"]
    assert [row["images"] for row in rows if row["kind"] == "compare"][1] == ["005.png", "006.png"]


def test_the_demo_shows_the_vision_pair_beside_the_text_pair(known: Path, tmp_path: Path) -> None:
    for name in ("target", "draft", "held_out.jsonl"):
        (tmp_path / name).symlink_to(TOY / name)
    (tmp_path / "vision").symlink_to(known)
    result = last_json(
        run("demo", "--pair", str(tmp_path), "--per-kind", "1", "--max-new-tokens", "8", "--json")
    )
    assert [row["kind"] for row in result["rows"]] == [
        "arithmetic",
        "code",
        "structured",
        "dialogue",
        *KINDS,
    ]
    assert result["all"]["identical"] is True


def test_generate_takes_images_in_their_order(folder: Path) -> None:
    files = [str(folder / "pictures" / name) for name in ("003.png", "000.png")]
    options = [*pair_options(folder), "--max-new-tokens", str(NEW)]
    result = run("generate", "What?", "--image", files[0], "--image", files[1], *options)
    assert result.exit_code == 0, result.output
    assert "[003.png] [000.png] What?" in result.stderr
    row = last_json(
        run("generate", "What?", "--image", files[0], "--image", files[1], *options, "--json")
    )
    parts = [{"type": "image", "path": file} for file in files]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    assert row["text"] == answer(*loaded(folder), prompt, max_new_tokens=NEW, do_sample=False).text
    swapped = run("generate", "What?", "--image", files[1], "--image", files[0], *options, "--json")
    assert last_json(swapped)["text"] != row["text"]


def test_images_that_cannot_be_used_are_one_sentence(folder: Path) -> None:
    missing = run("generate", "What?", "--image", "/nowhere.png", *pair_options(folder))
    assert (missing.exit_code, "expected an image file, got '/nowhere.png'" in missing.stderr) == (
        2,
        True,
    )
    unreadable = run(
        "generate", "What?", "--image", str(folder / "held_out.jsonl"), *pair_options(folder)
    )
    assert (unreadable.exit_code, "expected images that can be read" in unreadable.stderr) == (
        2,
        True,
    )
    texts = run(
        "generate", "What?", "--image", str(folder / "pictures" / "000.png"), *pair_options(TOY)
    )
    assert (texts.exit_code, "expected a processor" in texts.stderr) == (2, True)


def test_the_doctor_measures_images_as_generate_does(folder: Path) -> None:
    target, draft, processor = loaded(folder)
    chained = variant(draft, {})
    use_whole_blocks(chained)
    prompts = read_doctor_prompts(folder / "held_out.jsonl")[1:8]
    lengths: set[float] = set()
    for prompt in prompts:
        inputs = encode_prompt(processor, prompt, target.device)
        target.generate(**inputs, max_new_tokens=32, do_sample=False, assistant_model=chained)
        lengths.add(chained.last_stats.acceptance_length)
        probe = Probe(find_target(target), draft, write_answers(target, [inputs], 32))
        assert probe.walked({}) == pytest.approx(chained.last_stats.acceptance_length), prompt
    assert len(lengths) > 4, "all prompts accept the same: the case shows nothing"
    diagnosis = diagnose(target, draft, processor, prompts[:2], max_new_tokens=16)
    status = {check.name: check.status for check in diagnosis.checks}
    assert status["weights"] == "finding", "norms as initialised"
    assert status["chat_template"] == "skipped"


def test_the_doctor_command_takes_images(known: Path) -> None:
    options = ["--max-new-tokens", str(NEW), "--num-prompts", "4", "--json"]
    result = run(
        "doctor", *pair_options(known), "--prompts", str(known / "held_out.jsonl"), *options
    )
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout.splitlines()[-1])["findings"] == ["weights"]


def test_convert_asks_a_vision_target(known: Path, tmp_path: Path) -> None:
    options = ["--to", "speculators", "--target", str(known / "target")]
    plain = tmp_path / "draft"
    shutil.copytree(known / "draft", plain)
    config = json.loads((plain / "config.json").read_text())
    config |= {"layer_types": ["full_attention"] * 2, "sliding_window": None, "is_causal": False}
    (plain / "config.json").write_text(json.dumps(config))
    result = run("convert", str(plain), str(tmp_path / "out"), *options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_damaged_tags_and_huge_images_are_not_the_templates_fault(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, processor = loaded(folder)
    prompt = read_prompts(folder / "held_out.jsonl", 1)[0]["messages"]
    path = tmp_path / "bad.png"
    prompt[0]["content"][0]["path"] = str(path)
    sentence = "expected images that can be read, got bad.png, of which one cannot"
    for exif in (b"II*\0", b"MM\0*\0\0\0", b"II"):
        picture(48, 32).save(path, exif=exif)
        with pytest.raises(ValueError, match=sentence):
            encode_prompt(processor, prompt, torch.device("cpu"))
    picture(48, 32).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=f"{sentence}.*decompression bomb"):
        encode_prompt(processor, prompt, torch.device("cpu"))
    monkeypatch.undo()
    monkeypatch.setattr(
        processor, "chat_template", "{{ messages[0]['role'] + messages[0]['content'] }}"
    )
    with pytest.raises(ValueError, match="expected a conversation that the chat template takes"):
        encode_prompt(processor, prompt, torch.device("cpu"))
    # A template may raise other errors too, also without images.
    for template in ("{{ '{}'.format() }}", "{{ 1 // 0 }}"):
        monkeypatch.setattr(processor, "chat_template", template)
        for asked in (prompt, [{"role": "user", "content": "Hello"}]):
            with pytest.raises(ValueError, match=r"chat template takes, got (Index|ZeroDiv)"):
                encode_prompt(processor, asked, torch.device("cpu"))
