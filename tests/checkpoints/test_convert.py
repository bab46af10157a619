"""`dflash-hf convert`: the same bits in another layout, a folder that is never half overwritten by accident."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.checkpoints.formats import detect_format
from dflash_hf.cli.main import app
from tiny import DEPTH, VOCAB, tiny_draft, tiny_target


def convert(*arguments: object) -> tuple[int, str]:
    """Runs the command; returns its status and what it printed."""
    result = CliRunner().invoke(app, ["convert", *(str(argument) for argument in arguments)])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a target and of a draft in z-lab's layout, stored in bfloat16."""
    target = tiny_target("qwen3")
    target.to(torch.bfloat16).save_pretrained(tmp_path / "target")
    draft = tiny_draft(target, layer_types=None, sliding_window=None).to(torch.bfloat16)
    save_draft(draft, tmp_path / "zlab", "zlab")
    return tmp_path / "target", tmp_path / "zlab"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """What is stored in a folder."""
    return load_file(folder / "model.safetensors")


def test_around_every_layout(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, source = pair
    first = weights_of(source)
    before = source
    for step, layout in enumerate(
        ["dflash", "speculators", "dflash", "muse", "zlab", "dflash", "zlab"]
    ):
        after = tmp_path / f"{step}-{layout}"
        extra = ["--target", target] if layout in ("speculators", "muse") else []
        status, printed = convert(before, after, "--to", layout, *extra)
        assert status == 0, printed
        assert f"format {layout}" in printed
        assert detect_format(json.loads((after / "config.json").read_text())).name == layout
        before = after
    last = weights_of(before)
    assert last.keys() == first.keys()
    for name, tensor in first.items():
        assert torch.equal(last[name].view(torch.uint8), tensor.view(torch.uint8)), name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, before)]
    # With the target at hand it is known that rows and module give the same, which Muse's layout asks for.
    assert configs[1]["dflash_config"].pop("raw_input_embeddings") is True
    assert configs[1].pop("is_causal") is False
    assert configs[0].pop("is_causal") is False
    assert configs[1] == configs[0]


def test_deepspec_takes_and_gives_back_the_targets_rows(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, source = pair
    anchored = load_draft(source, sample_from_anchor=True)
    anchored.save_pretrained(tmp_path / "anchored")
    status, printed = convert(
        tmp_path / "anchored", tmp_path / "deepspec", "--to", "deepspec", "--target", target
    )
    assert status == 0, printed
    assert {"embed_tokens.weight", "lm_head.weight"} <= weights_of(tmp_path / "deepspec").keys()
    own = load_draft(tmp_path / "deepspec")
    own.config.sample_from_anchor = False
    own.save_pretrained(tmp_path / "own")
    status, printed = convert(tmp_path / "own", tmp_path / "bare", "--to", "zlab")
    assert (status, "own_embed_tokens = True" in printed) == (2, True), printed
    status, printed = convert(
        tmp_path / "own", tmp_path / "bare", "--to", "zlab", "--target", target
    )
    assert status == 0, printed
    assert weights_of(tmp_path / "bare").keys() == weights_of(source).keys()


def test_a_target_states_what_muse_leaves_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, source = pair
    assert convert(source, tmp_path / "muse", "--to", "muse", "--target", target)[0] == 0
    config: dict[str, Any] = json.loads((tmp_path / "muse" / "config.json").read_text())
    del config["vocab_size"], config["num_target_layers"]  # as Transformers' own checkpoints
    (tmp_path / "muse" / "config.json").write_text(json.dumps(config))
    status, printed = convert(tmp_path / "muse", tmp_path / "back", "--to", "zlab")
    assert status == 2
    assert "vocab_size = None" in printed
    assert "num_target_layers = None" in printed
    assert not (tmp_path / "back").exists()
    assert convert(tmp_path / "muse", tmp_path / "back", "--to", "zlab", "--target", target)[0] == 0
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["vocab_size"], back["num_target_layers"]) == (VOCAB, DEPTH)


def test_what_a_target_would_settle_is_asked_for(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, source = pair
    for name, advice in (("muse", True), ("laguna", False)):
        status, printed = convert(source, tmp_path / name, "--to", name)
        assert status == 2, printed
        assert ("give the target (--target)" in " ".join(printed.split())) is advice
    assert convert(source, tmp_path / "muse", "--to", "muse", "--target", target)[0] == 0


def test_speculators_config_names_the_target(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, source = pair
    assert convert(source, tmp_path / "out", "--to", "speculators", "--target", target)[0] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    assert (
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        == config["block_size"] - 1
    )


def test_weights_keep_their_precision_whatever_the_config_says(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    source = pair[1]
    mixed = {
        n: t.float() + (1e-6 if "norm" in n else 0) if "norm" in n else t
        for n, t in weights_of(source).items()
    }
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    assert convert(source, tmp_path / "out", "--to", "dflash")[0] == 0
    out = weights_of(tmp_path / "out")
    assert all(torch.equal(out[name].double(), tensor.double()) for name, tensor in mixed.items())


def test_a_folder_with_files_is_kept(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = pair[1], tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors.index.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    status, printed = convert(source, out, "--to", "dflash")
    assert status == 2
    assert "expected a new or empty folder" in printed
    assert "--force" in printed
    assert sorted(file.name for file in out.iterdir()) == [
        "model.safetensors.index.json",
        "notes.txt",
    ]
    (out / "tokenizer_config.json").write_text("{}")
    (out / "adapter_config.json").write_text("{}")
    assert convert(source, out, "--to", "dflash", "--force")[0] == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "tokenizer_config.json").is_file()
    assert not (out / "adapter_config.json").exists()
    assert load_draft(out).config.vocab_size == VOCAB  # the stale index is gone
    assert convert(source, source, "--to", "dflash", "--force")[0] == 2
    assert load_draft(source)
    # What cannot be written leaves what was there.
    biased = tiny_draft(tiny_target("qwen3"), attention_bias=True)
    biased.save_pretrained(tmp_path / "biased")
    assert convert(tmp_path / "biased", out, "--to", "muse", "--force")[0] == 2
    assert load_draft(out).config.vocab_size == VOCAB


def test_a_folder_on_another_file_system_is_written(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, or a link to one: what is made beside it cannot be moved there."""
    source, out = pair[1], tmp_path / "out"
    assert convert(source, out, "--to", "dflash")[0] == 0
    move = Path.replace

    def move_within(self: Path, target: Path) -> Path:
        if out not in self.parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(self))
        return move(self, target)

    monkeypatch.setattr(Path, "replace", move_within)
    status, printed = convert(source, out, "--to", "zlab", "--force")
    assert status == 0, printed
    assert weights_of(out).keys() == weights_of(source).keys()
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("own", ["own_embed_tokens", "own_lm_head"])
def test_deepspec_takes_the_one_of_embedding_and_head_that_a_draft_lacks(
    own: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"layer_types": None, "sliding_window": None, own: True}
    draft = tiny_draft(tiny_target("qwen3"), sample_from_anchor=True, **fields)
    draft.to(torch.bfloat16).save_pretrained(tmp_path / "one")
    status, printed = convert(
        tmp_path / "one", tmp_path / "out", "--to", "deepspec", "--target", pair[0]
    )
    assert status == 0, printed
    both = weights_of(tmp_path / "out")
    theirs = weights_of(pair[0])
    lacking = {"own_embed_tokens": "lm_head.weight", "own_lm_head": "embed_tokens.weight"}[own]
    assert {"embed_tokens.weight", "lm_head.weight"} <= both.keys()
    assert torch.equal(both[lacking], theirs[lacking.replace("embed", "model.embed")])


def test_unknown_layout_is_a_usage_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    status, printed = convert(pair[1], tmp_path / "out", "--to", "gguf")
    assert status == 2
    assert "gguf" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["SRC", "--target"])
def test_a_path_that_is_not_there_is_named(
    option: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, source = ("/no/such", pair[1]) if option == "--target" else (pair[0], "/no/such")
    status, output = convert(source, tmp_path / "new", "--to", "speculators", "--target", target)
    assert status == 2
    assert f"as {option}, got '/no/such', which is not there" in output
    assert not (tmp_path / "new").exists()


def test_a_pair_the_wrong_way_round_is_told_so(pair: tuple[Path, Path], tmp_path: Path) -> None:
    save_draft(load_draft(pair[1]), tmp_path / "draft")
    result = CliRunner().invoke(
        app, ["generate", "--target", str(tmp_path / "draft"), "--draft", str(pair[0]), "hi"]
    )
    assert result.exit_code == 2
    assert "swap --target and --draft" in " ".join(result.output.split())


def test_a_folder_in_the_place_of_the_config(pair: tuple[Path, Path]) -> None:
    (pair[1] / "config.json").unlink()
    (pair[1] / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"expected a file .*config.json, got a folder"):
        load_draft(pair[1])


def test_whole_numbers_where_fractions_are_usual(pair: tuple[Path, Path]) -> None:
    file = pair[1] / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 0, "initializer_range": 1})
    )
    assert load_draft(pair[1]).config.rms_norm_eps == 0


def test_two_dtypes_contradict_each_other(pair: tuple[Path, Path]) -> None:
    file = pair[1] / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "dtype": "float16", "torch_dtype": "bfloat16"})
    )
    with pytest.raises(
        ValueError,
        match=r"one value, got dtype = 'float16' beside torch_dtype = 'bfloat16'; .*config.json",
    ):
        load_draft(pair[1])
