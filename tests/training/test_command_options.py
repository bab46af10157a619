"""Options of `dflash-hf train`: which rows are read and how, what the chat template is told, where the draft goes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from dflash_hf import load_draft
from dflash_hf.cli.train_settings import OPTIONS
from dflash_hf.training.prompts import PromptSettings
from helpers.training_command import SMALL, TOY, said, train, write_rows, write_shallow_target

MOOD = "{%- if mood is defined -%}{{- '<|im_start|>system\\nBe ' + mood + '.<|im_end|>\\n' -}}{%- endif -%}"
TOLD = ["--chat-template-kwargs", '{"mood": "brief"}']


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shallow target, whose template can be told something; and beside it one whose template knows it."""
    folder = tmp_path_factory.mktemp("targets")
    text = (TOY / "target" / "chat_template.jinja").read_text(encoding="utf-8")
    for name, before in (("told", ""), ("knows", "{%- set mood = 'brief' -%}")):
        write_shallow_target(folder / name)
        (folder / name / "chat_template.jinja").write_text(before + MOOD + text, encoding="utf-8")
    return folder / "told"


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("without_figures")
def test_what_the_chat_template_is_told_comes_to_every_stage(target: Path, tmp_path: Path) -> None:
    """A template that is told something is one that knows it: the same prompts, answers, weights and bench."""
    data = write_rows(tmp_path / "rows.jsonl")
    outs = [tmp_path / name for name in ("told", "knows")]
    for out, more in zip(outs, (TOLD, []), strict=True):
        words = [*SMALL, "--target", target.with_name(out.name), *more, "--formats", "zlab"]
        result = train("--dataset", data, "--output-dir", out, *words)
        assert result.exit_code == 0, result.output
    rows, same = (lines(out / "answered" / "train.jsonl") for out in outs)
    assert {json.dumps(row["chat_template_kwargs"]) for row in rows} == {'{"mood": "brief"}'}
    for name in ("messages", "answer_ids", "num_tokens"):
        assert [row[name] for row in rows] == [row[name] for row in same]
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    untold = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]
    sizes = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in untold]
    told = [row["num_tokens"] - len(row["answer_ids"]) for row in rows]
    assert all(size < longer for size, longer in zip(sizes, told, strict=True)), "it shows"
    ours, theirs = (load_draft(out / "draft").state_dict() for out in outs)
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    (asked,), (known,) = (lines(out / "bench" / "answers-dflash.jsonl") for out in outs)
    for name in ("prompt_tokens", "token_ids", "committed"):
        assert asked["choices"][0][name] == known["choices"][0][name]
    assert (
        '| chat template reads | {"mood": "brief"} |'
        in (outs[0] / "draft" / "README.md").read_text()
    )
    result = train("--output-dir", outs[0], "--chat-template-kwargs", '{"mood": "long"}')
    assert result.exit_code == 2
    assert (
        "got a change: chat_template_kwargs was {'mood': 'brief'} and is {'mood': 'long'}"
        in said(result)
    )


def test_prompts_that_the_target_writes_are_told_too(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What [`write_prompts`] makes of it is in test_regenerate.py."""
    asked: list[Any] = []
    monkeypatch.setattr(
        "dflash_hf.cli.train_stages.write_prompts", lambda settings, *rest: asked.append(settings)
    )
    data = write_rows(tmp_path / "rows.jsonl")
    words = [
        *SMALL,
        "--target",
        target,
        *TOLD,
        "--stages",
        "prepare",
        "--self-prompts",
        3,
        "--dataset",
        data,
    ]
    train(*words, "--output-dir", tmp_path / "out")
    assert [settings.chat_template_kwargs for settings in asked] == [{"mood": "brief"}]


@pytest.mark.parametrize("name", ["moood", "moo", "role"])
def test_a_name_that_the_template_does_not_read_is_refused_first(
    target: Path, name: str, tmp_path: Path
) -> None:
    """A part of a name that it reads and a field of a message are none; no stage is begun."""
    words = ["--output-dir", tmp_path / "out", *SMALL, "--target", target, "--stages", "prepare"]
    options = json.dumps({name: "brief"})
    result = train(*words, "--self-prompts", 1, "--chat-template-kwargs", options)
    assert result.exit_code == 2
    assert f"expected chat_template_kwargs that the chat template reads, got '{name}'" in said(
        result
    )
    assert not (tmp_path / "out").exists()


def test_what_applies_a_template_is_no_option_of_it(target: Path, tmp_path: Path) -> None:
    """The template reads it, but the trainer says it itself."""
    words = ["--output-dir", tmp_path / "out", *SMALL, "--target", target, "--stages", "prepare"]
    options = '{"add_generation_prompt": true}'
    result = train(*words, "--self-prompts", 1, "--chat-template-kwargs", options)
    assert result.exit_code == 2
    expected = "expected options of the chat template, got 'add_generation_prompt'; leave it out"
    assert expected in said(result)
    assert not (tmp_path / "out").exists()


def test_options_of_a_template_that_is_none_are_refused(tmp_path: Path) -> None:
    target = write_shallow_target(tmp_path / "target")
    (target / "chat_template.jinja").write_text("{% for")
    words = ["--output-dir", tmp_path / "out", *SMALL, "--target", target, "--stages", "prepare"]
    result = train(*words, "--self-prompts", 1, *TOLD)
    assert result.exit_code == 2
    assert "expected a chat template that Jinja reads, got" in said(result)


def test_bad_rows_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    text = data.read_text()
    data.write_text(text + '{"messages": [{"role": "nobody", "content": "x"}]}\n')
    words = ["--dataset", data, *SMALL, "--stages", "prepare"]
    result = train(*words, "--output-dir", tmp_path / "all")
    assert result.exit_code == 2
    assert "expected a role in turn 0 of line 11 of" in said(result)
    result = train(*words, "--output-dir", tmp_path / "good", "--skip-bad-rows")
    assert result.exit_code == 0, result.output
    assert "left out 1" in result.output
    settings = (tmp_path / "good" / "settings.yaml").read_text()
    assert "skip_bad_rows: true" in settings
    # The folder's settings say it on, and a YAML off; a flag wins over either.
    assert train("--output-dir", tmp_path / "good", "--stages", "prepare").exit_code == 0
    result = train("--output-dir", tmp_path / "good", "--stages", "prepare", "--no-skip-bad-rows")
    assert "made again: prepare; skip_bad_rows was True and is False" in said(result)
    (tmp_path / "off.yaml").write_text(
        settings.replace("skip_bad_rows: true", "skip_bad_rows: false")
    )
    words = ["--config", tmp_path / "off.yaml", "--stages", "prepare"]
    assert train(*words, "--output-dir", tmp_path / "off").exit_code == 2
    assert train(*words, "--output-dir", tmp_path / "on", "--skip-bad-rows").exit_code == 0


def test_rows_without_an_answer_are_left_out_where_the_data_answers(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    answer = {"role": "assistant", "content": "Two."}
    asked = [row["messages"] for row in lines(data)]
    answered = [[*messages, answer] for messages in asked]
    asked_again = [[*messages, messages[0]] for messages in answered[:3]]
    rows = [{"messages": messages} for messages in (*answered, *asked, *asked_again)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    out = tmp_path / "out"
    words = ["--dataset", data, "--output-dir", out, *SMALL, "--stages", "prepare"]
    result = train(*words, "--answers", "data")
    assert result.exit_code == 0, result.output
    assert "left out 13" in result.output
    rows = lines(out / "prepared" / "train.jsonl") + lines(out / "prepared" / "held_out.jsonl")
    assert len(rows) == 10
    assert all(row["sequences"] for row in rows)


@pytest.mark.usefixtures("without_figures")
def test_held_out_turns_may_say_nothing(tmp_path: Path) -> None:
    """Calls of tools have no text, many sets have an empty system prompt, and the bench asks them as they are."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    rows: list[list[dict[str, Any]]] = []
    for number in range(10):
        ask = {"role": "user", "content": f"Count to {number}."}
        rows.append(
            [
                {"role": "system", "content": ""},
                ask,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": ""},
                {"role": "assistant", "content": "Done."},
                {"role": "user", "content": ""},
            ]
        )
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    out = tmp_path / "out"
    result = train("--dataset", data, "--output-dir", out, *SMALL)
    assert result.exit_code == 0, result.output
    (question,) = lines(out / "bench" / "questions.jsonl")
    assert question["history"] == rows[0][:-1]
    assert question["turns"] == [""]


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_sets_of_other_columns_are_read_and_streamed(
    streaming: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands for a set of the Hub: `datasets` loads both."""
    import datasets

    asked: list[Any] = []
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **named: asked.append(named) or load(*a, **named)
    )
    (tmp_path / "set").mkdir()
    with (tmp_path / "set" / "train.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"question": f"Compute {number} + 1."}) + "\n" for number in range(6)
        )
    words = [
        "--dataset",
        tmp_path / "set",
        *SMALL,
        "--num-eval",
        0,
        "--num-prompts",
        5,
        "--stages",
        "prepare",
    ]
    result = train(
        *words, "--output-dir", tmp_path / "out", "--template", "{question} Think.", *streaming
    )
    assert result.exit_code == 0, result.output
    rows = lines(tmp_path / "out" / "prepared" / "train.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == [
        f"Compute {n} + 1. Think." for n in range(5)
    ]
    assert [call.get("streaming", False) for call in asked] == [bool(streaming)]
    # How the rows came is not what they are.
    assert (
        "done before"
        in train("--output-dir", tmp_path / "out", "--stages", "prepare", "--no-streaming").output
    )
    result = train(
        "--output-dir", tmp_path / "out", "--stages", "prepare", "--template", "{question}"
    )
    change = "template was '{question} Think.' and is '{question}'"
    assert f"made again: prepare; {change}" in said(result)


def test_conversations_are_counted_in_each_set(tmp_path: Path) -> None:
    """As the help says it."""
    rows = write_rows(tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    sets = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    sets[0].write_text("".join(rows[:5]))
    sets[1].write_text("".join(rows[5:]))
    words = ["--dataset", f"{sets[0]},{sets[1]}", *SMALL, "--num-prompts", 3, "--num-eval", 0]
    result = train(*words, "--stages", "prepare", "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert len(lines(tmp_path / "out" / "prepared" / "train.jsonl")) == 6
    (item,) = (item for item in OPTIONS if item.name == "num_prompts")
    assert item.metadata["help"] == "Number of conversations taken from each set; default: all."


def test_prompts_that_the_target_writes_are_all_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--num-prompts` counts the conversations of `--dataset` alone."""

    def write(settings: PromptSettings, *rest: Any) -> None:
        texts = [f"What is {number}?" for number in range(settings.num_prompts)]
        rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
        settings.output.write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr("dflash_hf.cli.train_stages.write_prompts", write)
    words = [
        *SMALL,
        "--num-prompts",
        3,
        "--num-eval",
        0,
        "--self-prompts",
        6,
        "--stages",
        "prepare",
    ]
    words += ["--output-dir", tmp_path / "out"]
    result = train(*words)
    assert "expected --num-prompts with --dataset, got 3" in said(result)
    result = train(*words, "--dataset", write_rows(tmp_path / "rows.jsonl"))
    assert result.exit_code == 0, result.output
    assert len(lines(tmp_path / "out" / "prepared" / "train.jsonl")) == 3 + 6


def test_a_folder_begun_before_an_option_was_there_goes_on(tmp_path: Path) -> None:
    words = ["--dataset", write_rows(tmp_path / "rows.jsonl"), *SMALL, "--stages", "prepare"]
    assert train(*words, "--output-dir", tmp_path / "out").exit_code == 0
    state = json.loads((tmp_path / "out" / "stages.json").read_text())
    for name in ("chat_template_kwargs", "template", "skip_bad_rows"):
        del state["prepare"]["made_from"][name]
    (tmp_path / "out" / "stages.json").write_text(json.dumps(state))
    result = train("--output-dir", tmp_path / "out", "--stages", "prepare")
    assert "prepare: done before" in result.output
    result = train("--output-dir", tmp_path / "out", "--stages", "prepare", "--skip-bad-rows")
    assert "made again: prepare; skip_bad_rows was False and is True" in said(result)


class Hub:
    """In place of the Hub's client: notes what it is asked."""

    asked: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def create_repo(self, repo: str, **kwargs: Any) -> None:
        self.asked.append((repo, kwargs))

    def repo_info(self, repo: str) -> SimpleNamespace:
        return SimpleNamespace(private=bool(repo))

    def upload_folder(self, *, repo_id: str, folder_path: Path, **kwargs: Any) -> None:
        files = {
            str(file.relative_to(folder_path)): file.read_bytes()
            for file in folder_path.rglob("*.*")
        }
        self.asked.append((repo_id, files))


@pytest.mark.usefixtures("without_figures")
def test_the_draft_is_uploaded_behind_the_last_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `dflash-hf push` does it; the trainer, whose argument it is, uploads nothing in between."""
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    Hub.asked = []
    data, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    hub = ["--push-to-hub", "--hub-model-id", "my-org/my-draft", "--hub-private-repo", "true"]
    # On all layers of the bundled target, unlike other tests
    target = ["--target", TOY / "target"]
    words = ["--dataset", data, "--output-dir", out, *SMALL, *target, "--formats", "zlab", *hub]
    assert train(*words, "--stages", "prepare").exit_code == 0
    assert Hub.asked == [], "there is no draft yet"
    result = train(*words)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "https://huggingface.co/my-org/my-draft"
    (made, options), (written, files) = Hub.asked
    assert (made, options, written) == (
        made,
        {"private": True, "exist_ok": True},
        "my-org/my-draft",
    )
    left = {
        name: (out / "draft" / name).read_bytes() for name in ("config.json", "model.safetensors")
    }
    assert {name: files[name] for name in left} == left
    assert files.keys() - left.keys() <= {
        "README.md",
        "generation_config.json",
        "custom_generate/generate.py",
    }
    own = (out / "draft" / "README.md").read_text().replace(str(out / "draft"), "my-org/my-draft")
    assert files["README.md"].decode().startswith(own.rstrip("\n")), "the card of export"
    # Begun without it, and gone on with it.
    result = train("--output-dir", out, "--hub-model-id", "my-org/another")
    assert [repo for repo, _ in Hub.asked[2:]] == ["my-org/another"] * 2
    train("--output-dir", out, "--push-to-hub", "false")
    assert len(Hub.asked) == 4


def test_a_process_killed_while_it_wrote_the_settings_goes_on(tmp_path: Path) -> None:
    """What it was writing is no folder of something else; nor is what another process of the run is writing now."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".settings.yaml.part").write_text("targ")
    words = ["--dataset", write_rows(tmp_path / "rows.jsonl"), *SMALL, "--stages", "prepare"]
    result = train(*words, "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output


def test_a_format_that_cannot_express_the_draft_is_left_out_and_said(tmp_path: Path) -> None:
    """z-lab's drafts never sample from the anchor; where no format can express the draft the stage is refused."""
    data, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    words = [
        "--dataset",
        data,
        "--output-dir",
        out,
        *SMALL,
        "--stages",
        "prepare,regenerate,run,export",
    ]
    result = train(
        *words,
        "--draft-options",
        '{"num_taps": 2, "sample_from_anchor": true}',
        "--formats",
        "zlab",
    )
    assert result.exit_code == 2
    assert "expected a draft that the format 'zlab' can express" in said(result)
    shutil.rmtree(out / "export")
    result = train("--output-dir", out, "--formats", "zlab,speculators", "--stages", "export")
    assert result.exit_code == 0, result.output
    assert "zlab left out: expected a draft that the format 'zlab' can express" in said(result)
    assert "speculators written" in said(result)
    assert [path.name for path in (out / "export").iterdir()] == ["speculators"]


REFUSED: dict[str, tuple[list[object], str]] = {
    "no object": (
        ["--chat-template-kwargs", "thinking"],
        "expected a JSON object as --chat-template-kwargs",
    ),
    "no repository": (
        ["--push-to-hub"],
        "expected --hub-model-id with --push-to-hub, an id such as my-org/my-draft",
    ),
    "no id": (
        ["--push-to-hub", "--hub-model-id", "mine"],
        "an id such as my-org/my-draft, got 'mine'",
    ),
    "token": (
        ["--hub-token", "x"],
        "expected only hub_model_id, hub_private_repo of the options hub_..., got 'hub_token'; leave it out",
    ),
    "checkpoint": (
        ["--resume-from-checkpoint", "run/checkpoint-2"],
        "expected no --resume-from-checkpoint, got 'run/checkpoint-2'; leave it out: the run "
        "in the folder continues from its last complete checkpoint",
    ),
    "dtype": (
        ["--save-dtype", "auto"],
        "expected no --save-dtype, got 'auto'; leave it out: the draft is saved in the target's dtype",
    ),
    "template": (
        ["--template", "{q}", "--self-prompts", 2],
        "expected --template without --self-prompts",
    ),
    "prompts without answers": (
        ["--answers", "data", "--self-prompts", 2],
        "expected no --self-prompts with --answers data, got 2; let the target answer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_a_sentence_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    words, sentence = REFUSED[name]
    result = train(
        "--dataset", TOY / "held_out.jsonl", "--output-dir", tmp_path / "out", *SMALL, *words
    )
    assert result.exit_code == 2, result.output
    assert sentence in said(result)
    assert list(tmp_path.iterdir()) == []


def test_rows_are_prepared_again_for_the_answers_in_the_data(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    answer = {"role": "assistant", "content": "Two."}
    rows = [{"messages": [*row["messages"], answer]} for row in lines(data)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    out = tmp_path / "out"
    words = ["--dataset", data, "--output-dir", out, *SMALL, "--stages", "prepare"]
    result = train(*words)
    assert result.exit_code == 0, result.output
    result = train(*words, "--answers", "data")
    assert "made again: prepare; answers was 'target' and is 'data'" in said(result)
    assert all(row["sequences"] for row in lines(out / "prepared" / "train.jsonl"))
