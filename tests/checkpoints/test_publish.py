"""`inspect`, `drafts` and `push`: what a draft is, which there are, and one that others can use by one argument."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from dflash_hf.checkpoints.drafts import inspect_draft, load_draft, save_draft
from dflash_hf.checkpoints.files import StoredTensor, stored_tensors
from dflash_hf.checkpoints.formats import FORMATS
from dflash_hf.cli.drafts import published_drafts
from dflash_hf.cli.main import app
from helpers.source_tree import ROOT
from tiny import tiny_draft, tiny_target

TOY = ROOT / "demos" / "toy"


def run(*arguments: object, columns: int = 80) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)}
    )


# ---- inspect


@pytest.mark.parametrize(
    ("format", "unused"),
    [
        ("zlab", {"confidence_head.proj.weight": (1, 32), "confidence_head.proj.bias": (1,)}),
        ("speculators", {"verifier_norm.weight": (32,), "verifier_lm_head.weight": (64, 32)}),
    ],
)
def test_what_is_stored_and_not_loaded_has_no_dtype_and_no_parameters(
    format: Any, unused: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target, layer_types=None, sliding_window=None).to(torch.bfloat16)
    save_draft(draft, tmp_path, format, target)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    more = {name: torch.ones(shape) for name, shape in unused.items()}
    save_file(weights | more, file, metadata={"format": "pt"})
    found = inspect_draft(tmp_path)
    assert (found["num_parameters"], found["dtypes"]) == (draft.num_parameters(), ["BF16"])
    result = run("convert", tmp_path, tmp_path / "out", "--to", "zlab")
    assert result.exit_code == 0, result.stderr
    assert {one.dtype for one in stored_tensors(tmp_path / "out").values()} == {"BF16"}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": None}))
    assert load_draft(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("format", FORMATS)
def test_inspect_says_what_loading_finds(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("qwen3")
    extra: dict[str, Any] = {}
    if format.startswith("deepspec"):
        extra = {"sample_from_anchor": True}
    if format == "deepspec-gemma4":
        extra |= {"layer_family": "gemma4", "input_embedding_scale": 32**0.5}
    if format == "laguna":
        extra = {"layer_family": "laguna"}
    draft = tiny_draft(target, layer_types=None, sliding_window=None, **extra).to(torch.bfloat16)
    save_draft(draft, tmp_path, format, target)  # type: ignore[arg-type]
    loaded = load_draft(tmp_path)
    if format != "speculators":  # the map of a vocabulary is read
        monkeypatch.setattr(StoredTensor, "read", None)
    found = inspect_draft(tmp_path)
    assert (found["format"], found["is_dflash2"], found["dtypes"]) == (format, False, ["BF16"])
    # The factors of Gemma 4's layers are stored, and are no parameters.
    factors = [buffer for name, buffer in loaded.named_buffers() if name.endswith("layer_scalar")]
    assert found["num_parameters"] == loaded.num_parameters() + len(factors)
    assert found["num_bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert found["num_proposals"] == loaded.config.num_proposals(loaded.config.block_size)
    names = (
        "target_layer_ids",
        "mask_token_id",
        "block_size",
        "own_lm_head",
        "num_target_layers",
        "vocab_size",
    )
    assert {name: found[name] for name in names} == {
        name: getattr(loaded.config, name) for name in names
    }
    assert json.loads(run("inspect", tmp_path, "--json").stdout) == {**found, "checked": None}


@pytest.mark.parametrize("columns", [60, 80])
def test_inspect_fits_the_terminal(columns: int) -> None:
    result = run("inspect", TOY / "draft", columns=columns)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= columns
    said = " ".join(result.stdout.split())
    for words in (
        "format dflash",
        "after layers 1, 4, 6, 9 (from 0)",
        "16 slots, 15 tokens proposed",
        "mask token 3",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("front", "named"),
    [
        ("base_model: Qwen/Qwen3-8B\n", "Qwen/Qwen3-8B"),
        ("license: mit\nbase_model:\n- Qwen/Qwen3-8B\n", "Qwen/Qwen3-8B"),
        ("license: mit\n", None),
    ],
)
def test_the_target_that_a_card_names(front: str, named: str | None, tmp_path: Path) -> None:
    shutil.copytree(TOY / "draft", tmp_path / "draft")
    (tmp_path / "draft" / "README.md").write_text(
        f"---\n{front}---\n\n# A draft\nbase_model: another/one\n"
    )
    assert inspect_draft(tmp_path / "draft")["target"] == named


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("z-lab/Qwen3-8B-DFlash-b16", "published for Qwen/Qwen3-8B; config checked"),
        ("z-lab/GLM-5.1-DFlash", "published for zai-org/GLM-5.1; nothing checked here"),
    ],
)
def test_inspect_says_what_was_checked(name: str, said: str, tmp_path: Path) -> None:
    shutil.copytree(TOY / "draft", tmp_path / name)
    assert said in " ".join(run("inspect", tmp_path / name, columns=200).stdout.split())
    assert "published" not in run("inspect", TOY / "draft", columns=200).stdout


@pytest.mark.parametrize("checked", ["config", "layout", "no", "refused"])
def test_inspect_as_json_says_what_was_checked(checked: str, tmp_path: Path) -> None:
    name = next(one.draft for one in published_drafts() if one.checked == checked)
    shutil.copytree(TOY / "draft", tmp_path / name)
    assert json.loads(run("inspect", tmp_path / name, "--json").stdout)["checked"] == checked


def test_drafts_say_what_is_refused() -> None:
    printed = " ".join(run("drafts", "--target", "NVFP4", columns=80).stdout.split())
    assert "30B-A3B-NVFP4-DFlash refused: a variant that is not supported" in printed
    printed = " ".join(run("drafts", "--target", "Qwen3.8-27B", columns=80).stdout.split())
    assert "RadixArk/Qwen3.8-27B-DSpark layout checked" in printed
    assert "incoai/Qwen3.8-27B-DFlash2 config checked" in printed


def test_inspect_refuses_what_loading_refuses(tmp_path: Path) -> None:
    shutil.copytree(TOY / "draft", tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": 64}))
    for place, message in (
        (tmp_path / "draft", "expected exactly the weights"),
        ("/nowhere", "as DRAFT"),
    ):
        result = run("inspect", place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in " ".join(result.stderr.split())


# ---- drafts


def test_published_drafts_are_a_table_of_known_values() -> None:
    found = published_drafts()
    assert len({one.draft for one in found}) == len(found) >= 15
    hub_id = re.compile(r"[\w.-]+/[\w.-]+")
    for one in found:
        assert hub_id.fullmatch(one.target), one
        assert hub_id.fullmatch(one.draft), one
        assert one.format in FORMATS, one
        assert one.thinking in ("on", "off", None), one
        assert one.checked in ("config", "layout", "refused", "no"), one
        named = re.search(r"(?:-b|block)(\d+)$", one.draft)
        assert named is None or int(named[1]) == one.block_size, one


@pytest.mark.parametrize("columns", [60, 80])
def test_drafts_fit_the_terminal_and_are_filtered(columns: int) -> None:
    result = run("drafts", "--target", "QWEN3-8b", columns=columns)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "z-lab/Qwen3-8B-DFlash-b16" in "".join(result.stdout.split())
    assert "Llama" not in result.stdout
    rows = json.loads(run("drafts", "--json", "--target", "Qwen3-8B").stdout)
    assert {row["target"] for row in rows} == {"Qwen/Qwen3-8B"}
    assert "no published draft for 'nothing'" in run("drafts", "--target", "nothing").stdout


# ---- push


def test_a_pushed_draft_decodes_by_one_argument(tmp_path: Path) -> None:
    shutil.copytree(TOY / "draft", tmp_path / "draft", ignore=shutil.ignore_patterns("README.md"))
    result = run(
        "push",
        tmp_path / "draft",
        "--to",
        tmp_path / "out",
        "--target",
        TOY / "target",
        columns=400,
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "out")
    before, after = TOY / "draft" / "model.safetensors", tmp_path / "out" / "model.safetensors"
    assert after.read_bytes() == before.read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"custom_generate='{tmp_path / 'out'}'" in card
    assert f'from_pretrained("{tmp_path / "out"}"' in card
    assert "Trained by" not in card, "it may be another's draft"
    target: Any = AutoModelForCausalLM.from_pretrained(TOY / "target")
    messages = [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]
    inputs: Any = AutoTokenizer.from_pretrained(TOY / "target").apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    settings = {**inputs, "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**settings)
    forwards: list[int] = []
    target.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    drafted = target.generate(
        **settings, custom_generate=str(tmp_path / "out"), trust_remote_code=True
    )
    assert torch.equal(drafted, plain)
    assert 0 < len(forwards) < 24


def test_a_card_that_is_there_is_kept(tmp_path: Path) -> None:
    shutil.copytree(TOY / "draft", tmp_path / "draft")
    text = '---\nbase_model: some/target\n---\n\n# Mine\n\nload_draft("PATH/TO/THIS/FOLDER")\n'
    (tmp_path / "draft" / "README.md").write_text(text)
    for step, (source, place) in enumerate([("draft", "one"), ("one", "two")]):
        assert run("push", tmp_path / source, "--to", tmp_path / place).exit_code == 0, step
    card = (tmp_path / "one" / "README.md").read_text()
    assert card.startswith(text.replace("PATH/TO/THIS/FOLDER", str(tmp_path / "one")).rstrip("\n"))
    assert card.count("## In one line") == 1


class Hub:
    """In place of the Hub's client: notes what it is asked."""

    asked: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012
    refuses = False
    public: tuple[str, ...] = ()  # repositories that are there

    def create_repo(self, repo: str, **kwargs: Any) -> None:
        if self.refuses:
            raise ConnectionError("no\nnetwork")
        self.asked.append((repo, kwargs))

    def repo_info(self, repo: str) -> SimpleNamespace:
        return SimpleNamespace(private=repo not in self.public)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]
    ) -> None:
        assert commit_message
        code = (folder_path / "custom_generate" / "generate.py").read_text()
        self.asked.append(
            (
                repo_id,
                {
                    "files": sorted(file.name for file in folder_path.iterdir()),
                    "code": code,
                    "deleted": delete_patterns,
                },
            )
        )


def test_push_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    Hub.asked = []
    result = run(
        "push", TOY / "draft", "my-org/my-draft", "--target", "my-org/my-target", "--private"
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == "https://huggingface.co/my-org/my-draft"
    (made, options), (written, content) = Hub.asked
    assert (made, options, written) == (made, {"private": True, "exist_ok": True}, made)
    assert {"README.md", "config.json", "custom_generate", "model.safetensors"} <= set(
        content["files"]
    )
    assert "DRAFT = 'my-org/my-draft'" in content["code"]
    # Files of an earlier draft would be loaded in place of these.
    before = ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    others = ["other/model.safetensors", "adapter_model.safetensors", "config.json"]
    deleted = filter_repo_objects([*before, *others], allow_patterns=content["deleted"])
    assert list(deleted) == before
    monkeypatch.setattr(Hub, "refuses", True)
    result = run("push", TOY / "draft", "my-org/my-draft", "--target", "my-org/my-target")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected to upload to my-org/my-draft, got ConnectionError: no network" in " ".join(
        result.stderr.split()
    )


def test_without_private_the_organization_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    Hub.asked = []
    monkeypatch.setattr(Hub, "public", ("my-org/my-draft",))
    result = run("push", TOY / "draft", "my-org/my-draft", "--target", "my-org/my-target")
    assert result.exit_code == 0, result.stderr
    assert [repo for repo, _ in Hub.asked] == ["my-org/my-draft"] * 2
    assert Hub.asked[0][1] == {"private": None, "exist_ok": True}


def test_nothing_private_is_uploaded_to_a_public_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    Hub.asked = []
    monkeypatch.setattr(Hub, "public", ("my-org/my-draft",))
    result = run(
        "push", TOY / "draft", "my-org/my-draft", "--target", "my-org/my-target", "--private"
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "expected a private repository, got my-org/my-draft, which is there and public; make it private on the Hub, "
        "or choose another id" in " ".join(result.stderr.split())
    )
    assert len(Hub.asked) == 1, "nothing is uploaded"


BAD: list[tuple[list[object], str]] = [
    ([], "expected a Hub id or --to FOLDER, got both or neither"),
    (["a/b", "--to", "x"], "expected a Hub id or --to FOLDER, got both or neither"),
    (["not a repository"], "expected a Hub id such as my-org/my-draft, got 'not a repository'"),
    (["--to", TOY], "expected a new or empty folder as --to"),
    (["my-org/my-draft"], "name no target; give --target"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_push_refuses(
    arguments: list[object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", None)
    result = run("push", TOY / "draft", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())
