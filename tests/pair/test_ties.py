"""What the commands say, and exit with, where answers differ: at a tie, and where the draft's is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM, Qwen3VLForConditionalGeneration
from typer.testing import CliRunner, Result

from dflash_hf.chat.conversation import Conversation, Settings
from dflash_hf.chat.model import ChatModel
from dflash_hf.cli.main import app
from dflash_hf.pair.agreement import agreement
from dflash_hf.pair.answers import encode_prompt
from dflash_hf.pair.loading import load_pair
from helpers.half import half

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
PROMPT = "Compute 41 + 80 - 99 + 14."
INDEX = 6  # of the token that is changed
UNUSED = 1000  # a token that no answer here has
GENERATE = ("generate", PROMPT, "--max-new-tokens", "12", "--compare")
DEMO = ("demo", "--per-kind", "1", "--max-new-tokens", "8", "--dtype", "bfloat16")
FORMS = {"text": (), "JSON": ("--json",)}


def let_drafts_differ(monkeypatch: pytest.MonkeyPatch, ties: bool) -> None:
    """Has answers with a draft another token in one place, which is as good as plain's if it ties."""
    for model_class in (Qwen3ForCausalLM, Qwen3VLForConditionalGeneration):
        monkeypatch.setattr(model_class, "generate", differing(model_class.generate, ties))


def differing(whole: Any, ties: bool) -> Any:
    """`generate`, but for that token. Of the class, so that a copy of a model has it too."""

    def generate(model: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        if assistant_model is None:
            return whole(model, *args, **kwargs)
        out = whole(model, *args, assistant_model=assistant_model, **kwargs)
        column = kwargs["input_ids"].shape[1] + INDEX
        if out.shape[1] > column:  # not a warm-up
            if ties:  # of equal logits the first is taken, which is plain's
                with torch.no_grad():
                    head = model.get_output_embeddings()
                    head.weight[UNUSED] = head.weight[out[0, column]]
            out[0, column] = UNUSED
        return out

    return generate


def run(monkeypatch: pytest.MonkeyPatch, ties: bool, *arguments: str) -> Result:
    """Runs a command in this process, with such drafts."""
    with monkeypatch.context() as patch:
        let_drafts_differ(patch, ties)
        return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def first_prompts(folder: Path, place: Path, count: int) -> str:
    """A bundled pair with the first prompts of so many kinds only."""
    place.mkdir()
    for file in folder.iterdir():
        if file.name in ("target", "draft", "pictures"):
            (place / file.name).symlink_to(file)
    lines: dict[str, str] = {}
    for line in (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines():
        lines.setdefault(json.loads(line)["kind"], line)
    kept = list(lines.values())[:: len(lines) // count][:count]
    (place / "held_out.jsonl").write_text("\n".join(kept), encoding="utf-8")
    return str(place)


def words(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize(("dtype", "form"), half(["float32", "bfloat16"], FORMS))
def test_tie_is_said_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, dtype: str, form: tuple[str, ...]
) -> None:
    result = run(monkeypatch, True, *GENERATE, "--dtype", dtype, *form)
    said = words(result)
    assert result.exit_code == 0, said
    if form:
        row = json.loads(result.stdout.splitlines()[-1])
        difference = row["difference"]
        assert (row["identical"], difference["token"]) == (False, INDEX)
        assert difference["is_tie"] is True
    else:
        assert (
            "the answer differs from token 7 on, where two logits tie within rounding (margin 0)"
            in said
        )
        assert "1 tie" in said
        assert "NO" not in said


@pytest.mark.parametrize(("dtype", "form"), half(["float32", "bfloat16"], FORMS))
def test_another_difference_is_said_and_fails(
    monkeypatch: pytest.MonkeyPatch, dtype: str, form: tuple[str, ...]
) -> None:
    result = run(monkeypatch, False, *GENERATE, "--dtype", dtype, *form)
    said = words(result)
    assert result.exit_code == 1, said
    if form:
        row = json.loads(result.stdout.splitlines()[-1])
        assert row["difference"]["is_tie"] is False
        assert row["difference"]["margin"] > row["difference"]["tolerance"]
    else:
        sentence = "differs from token 7 on, where two logits do not tie within rounding to"
        assert f"{sentence} {dtype}" in said
        assert "NO" in said


@pytest.mark.parametrize(
    ("ties", "form"),
    [
        (True, ()),
        (True, ("--json",)),
        (False, ("--json",)),
        pytest.param(False, (), marks=pytest.mark.slow),
    ],
)
def test_demo_counts_ties_and_fails_on_others_with_images_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ties: bool, form: tuple[str, ...]
) -> None:
    options = (*DEMO, "--pair", first_prompts(TOY / "vision", tmp_path / "pair", 2))
    result = run(monkeypatch, ties, *options, *form)
    said = words(result)
    assert result.exit_code == (0 if ties else 1), said
    if form:
        record = json.loads(result.stdout.splitlines()[-1])
        assert all(row["difference"]["measured_in"] == "float32" for row in record["rows"])
        assert record["all"]["identical"] is False
        assert record["all"]["ties"] == (len(record["rows"]) if ties else 0)
    else:
        assert ("NO" in said) == (not ties)


@pytest.mark.parametrize("ties", [True, False])
def test_race_of_the_chat_says_the_same(monkeypatch: pytest.MonkeyPatch, ties: bool) -> None:
    model = ChatModel(*load_pair(str(TOY / "target"), str(TOY / "draft"), "bfloat16"))
    let_drafts_differ(monkeypatch, ties)
    conversation = Conversation()
    *_, asked = model.ask(conversation, PROMPT, [], Settings(max_new_tokens=4))
    assert asked.agreement is None
    *_, (plain, drafted) = model.race(conversation, conversation.turns, 16)
    assert plain.agreement is None
    assert drafted.agreement is not None
    assert (drafted.agreement.token, drafted.agreement.is_tie) == (INDEX, ties)


def test_margin_with_images_is_that_of_the_logits_in_decoding() -> None:
    target, _, processor = load_pair(str(TOY / "vision" / "target"), str(TOY / "vision" / "draft"))
    parts = [{"type": "image", "path": str(TOY / "vision" / "pictures" / "describe-0.png")}]
    messages = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What is in this picture?"}]}
    ]
    inputs = encode_prompt(processor, messages, target.device)
    model: Any = target
    kept: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "do_sample": False,
    }
    out = model.generate(**inputs, **kept, max_new_tokens=20)
    plain = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    for index in (0, 7, 19):
        logits = out.logits[index][0]
        second = int(logits.argsort(descending=True)[1])
        found = agreement(target, inputs, plain, [*plain[:index], second], do_sample=False)
        assert found.margin == pytest.approx(float(logits.max() - logits[second]), abs=1e-4)


@pytest.mark.parametrize("folder", [TOY, TOY / "vision"])
def test_bundled_pairs_in_bfloat16_differ_at_ties_at_most(tmp_path: Path, folder: Path) -> None:
    place = first_prompts(folder, tmp_path / "pair", 3)
    result = CliRunner().invoke(app, [*DEMO, "--pair", place, "--json", "--max-new-tokens", "32"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    different = [row for row in record["rows"] if not row["identical"]]
    assert (record["all"]["ties"], record["all"]["prompts"]) == (len(different), 3)
    assert all(row["difference"]["margin"] < 0.5 for row in different)
