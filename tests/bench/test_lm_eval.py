"""lm-eval answers with a draft what it answers without one: same texts, same scores, batched, from its registry."""

from __future__ import annotations

import json
import runpy
import sys
import tomllib
from importlib.metadata import EntryPoint
from typing import Any

import lm_eval
import lm_eval.__main__
import pytest
import torch
import yaml
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from dflash_hf import SpeculativeStats, load_draft
from dflash_hf.bench.lm_eval import DFlashLM, StopTexts
from helpers.half import half
from helpers.source_tree import ROOT

TOY = ROOT / "demos" / "toy"
ROWS = 3
TASK: dict[str, Any] = {
    "task": "toy",
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0},
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Tasks over a few held-out prompts of the bundled pair, whose answers' first lines are right."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [json.loads(line) for line in (TOY / "held_out.jsonl").read_text().splitlines()]
    rows = [row for row in rows if len(row["messages"]) == 1]
    rows = rows[:: len(rows) // ROWS]
    data = folder / "rows.jsonl"
    questions = [
        {"question": row["messages"][0]["content"], "answer": row["answer"].split("\n")[0]}
        for row in rows[:ROWS]
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in questions))
    for name, until in (("toy", []), ("toy_until", ["\n", "; "])):
        task = TASK | {
            "task": name,
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(folder / "cache"),
            },
            "generation_kwargs": {"until": until, "do_sample": False, "max_gen_toks": 24},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def lm() -> DFlashLM:
    """The bundled pair, which answers all rows in one batch; not to be changed for good."""
    return DFlashLM(
        str(TOY / "target"),
        draft=str(TOY / "draft"),
        dtype="float32",
        device="cpu",
        batch_size=ROWS,
    )


@pytest.fixture(scope="module")
def whole(lm: DFlashLM, tasks: TaskManager) -> list[str]:
    """What it answers up to the task's limit."""
    return evaluated(lm, tasks, "toy")[0]


def evaluated(
    model: Any, tasks: TaskManager, task: str, **settings: Any
) -> tuple[list[str], dict[str, Any]]:
    """The answers of a run in the order of the rows, and its scores."""
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=tasks,
        apply_chat_template=True,
        bootstrap_iters=0,
        **settings,
    )
    assert results is not None
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    scores = {
        key: value
        for key, value in results["results"][task].items()
        if key.startswith("exact_match")
    }
    return [sample["resps"][0][0] for sample in samples], scores


@pytest.mark.parametrize(("batch", "task"), half([1, 2], ["toy", "toy_until"]))
def test_answers_and_scores_are_those_without_a_draft(
    batch: int, task: str, tasks: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[Any] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        drafts.append(load_draft(*args, **kwargs))
        return drafts[-1]

    monkeypatch.setattr("dflash_hf.bench.lm_eval.load_draft", recorded)
    shared: dict[str, Any] = {"batch_size": batch, "device": "cpu"}
    target = f"pretrained={TOY / 'target'},dtype=float32"
    expected, expected_scores = evaluated("hf", tasks, task, model_args=target, **shared)
    answers, scores = evaluated(
        "dflash-hf", tasks, task, model_args=f"{target},draft={TOY / 'draft'}", **shared
    )
    assert answers == expected
    assert scores == expected_scores
    assert len(set(answers)) == ROWS
    (draft,) = drafts
    assert draft.dtype == torch.float32
    assert draft.last_stats.acceptance_length > 1.5, "the draft was not used"
    assert (scores["exact_match,none"] > 0) == (task == "toy_until"), (
        "a score that no text changes shows nothing"
    )


def advanced_together(stats: SpeculativeStats) -> bool:
    """Whether all rows committed as many tokens in every verify but a row's last."""
    first, *others = stats.num_committed
    return all(a == b for row in others for a, b in zip(first[:-1], row[:-1], strict=False))


def test_rows_of_a_batch_do_not_wait_for_each_other(
    lm: DFlashLM, tasks: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, _ = evaluated(lm, tasks, "toy", gen_kwargs="max_gen_toks=48")
    assert not advanced_together(lm.draft.last_stats)
    monkeypatch.setattr(lm, "think_end_token", "<nothing says this>")
    assert evaluated(lm, tasks, "toy", gen_kwargs="max_gen_toks=48")[0] == answers
    assert advanced_together(lm.draft.last_stats), "lm-eval's own criteria see the whole batch"


@pytest.mark.parametrize("thinks", [False, True])
def test_stop_strings_of_the_target_end_the_answers(
    thinks: bool,
    lm: DFlashLM,
    whole: list[str],
    tasks: TaskManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = whole[0].split()[3]
    monkeypatch.setattr(lm.model.generation_config, "stop_strings", [stop])
    if thinks:
        monkeypatch.setattr(lm, "think_end_token", "<nothing says this>")
    answers, _ = evaluated(lm, tasks, "toy")
    for answer, text in zip(answers, whole, strict=True):
        before, found, _ = text.partition(stop)
        assert answer == before + found
    assert answers != whole


def test_stop_texts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOY / "target")
    prompt, answer = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("Stop here.", "So it is 12; then")
    )
    ids = torch.tensor([[*prompt, *answer]])
    ends = {
        text: StopTexts(tokenizer, [text, ""], len(prompt))
        for text in ("; ", "Stop", "is 12", "13")
    }
    stops = {
        text: [bool(criterion(ids[:, : len(prompt) + n], None)) for n in range(1, len(answer) + 1)]
        for text, criterion in ends.items()
    }
    said = [tokenizer.decode(answer[:n]) for n in range(1, len(answer) + 1)]
    for text in ("; ", "is 12"):
        first = [text in part for part in said].index(True)
        assert stops[text].index(True) == first, "a row stops at the token that ends the text"
    assert not any(stops["Stop"]), "what the prompt says ends nothing"
    assert not any(stops["13"])


def test_models_that_are_loaded_already_and_none(tasks: TaskManager) -> None:
    lm = DFlashLM(
        str(TOY / "target"), draft=load_draft(TOY / "draft"), dtype="float32", device="cpu"
    )
    answers, _ = evaluated(lm, tasks, "toy")
    assert lm.draft.last_stats.num_verifies > 0
    lm.draft, verifies = None, lm.draft.last_stats.num_verifies
    assert evaluated(lm, tasks, "toy")[0] == answers
    assert verifies


def test_a_draft_that_is_not_the_target_s_is_refused(tasks: TaskManager) -> None:
    draft = load_draft(TOY / "hybrid" / "draft")
    lm = DFlashLM(str(TOY / "target"), draft=draft, dtype="float32", device="cpu")
    with pytest.raises(ValueError, match=r"expected .*got .*; "):
        evaluated(lm, tasks, "toy")
    with pytest.raises(ValueError, match=r"expected .*got .*; "):
        DFlashLM(str(TOY / "target"), draft=str(TOY / "target"), dtype="float32", device="cpu")


def test_the_registry_has_it() -> None:
    assert get_model("dflash-hf") is DFlashLM
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "lm_eval.models"
    ]
    assert EntryPoint("dflash-hf", group["dflash-hf"], "lm_eval.models").load() is DFlashLM


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_command_line_is_lm_eval_s(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        lm_eval.__main__,
        "cli_evaluate",
        lambda: found.append((sys.argv[1:], get_model("dflash-hf"))),
    )
    monkeypatch.setattr(sys, "argv", ["dflash_hf.bench.lm_eval", "--model", "dflash-hf"])
    runpy.run_module("dflash_hf.bench.lm_eval", run_name="__main__", alter_sys=False)
    assert found == [(["--model", "dflash-hf"], DFlashLM)]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_without_lm_eval_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    with pytest.raises(ImportError, match=r"expected lm-eval .*pip install 'dflash-hf\[lm-eval\]'"):
        runpy.run_module("dflash_hf.bench.lm_eval", run_name="again")
