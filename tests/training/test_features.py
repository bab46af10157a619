"""Features from the disk are the target's own, bit for bit, and a damaged, foreign or full folder says so."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3ForCausalLM

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.training import features as module
from dflash_hf.training.anchors import all_anchors
from dflash_hf.training.collators import collate, collate_packed
from dflash_hf.training.example import Example
from dflash_hf.training.features import (
    FeatureCache,
    bytes_per_token,
    features_alone,
    from_float8,
    to_float8,
)
from dflash_hf.training.forward import Features, batch_loss
from dflash_hf.training.identity import target_identity
from dflash_hf.training.loss import decay_weights


@pytest.fixture
def found(target: Qwen3ForCausalLM) -> Target:
    return find_target(target.requires_grad_(False))


@pytest.fixture
def draft(make_draft) -> DFlashDraftModel:
    return make_draft()


@pytest.fixture
def written(
    found: Target, draft: DFlashDraftModel, examples: list[Example], tmp_path: Path
) -> FeatureCache:
    """The three examples, a file each."""
    cache = FeatureCache(tmp_path / "features")
    cache.write(found, draft.config, examples, num_likely=64)
    assert len(files(cache)) == 3
    return cache


def files(cache: FeatureCache) -> list[Path]:
    return sorted(cache.folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_the_targets_bit_for_bit(
    dtype: torch.dtype,
    target: Qwen3ForCausalLM,
    draft: DFlashDraftModel,
    examples: list[Example],
    tmp_path: Path,
) -> None:
    found = find_target(target.to(dtype))
    FeatureCache(tmp_path).write(found, draft.config, examples, num_likely=4)
    cache = FeatureCache(tmp_path)
    for example in examples:
        wanted, read = (
            features_alone(found, draft.config, example, 4),
            cache.read([example], collate([example])),
        )
        for name in ("taps", "next_ids", "next_log_probs"):
            assert getattr(read, name).dtype == getattr(wanted, name).dtype
            assert torch.equal(getattr(read, name), getattr(wanted, name)), name
        assert read.taps.dtype == dtype
    assert bytes_per_token(draft.config, dtype, 4) == 2 * 32 * dtype.itemsize + 32
    batch = collate(examples[::-1])
    together = cache.read(examples[::-1], batch)
    for row, example in enumerate(examples[::-1]):
        length = len(example.input_ids)
        assert torch.equal(
            together.taps[row, :length], features_alone(found, draft.config, example).taps[0]
        )
        assert not together.taps[row, length:].any()


@pytest.mark.parametrize("objective", ["cross_entropy", "kl"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_step_from_the_disk_is_the_step(
    objective,
    is_packed: bool,
    found: Target,
    draft: DFlashDraftModel,
    examples: list[Example],
    written: FeatureCache,
) -> None:
    batch = collate_packed(examples, 25) if is_packed else collate(examples)
    anchors, weights = all_anchors(batch.loss_mask, 6, batch.starts), decay_weights(6, 3.0)
    read = written.read(examples, batch)
    losses = [
        batch_loss(
            draft, found, batch, anchors, weights, objective=objective, features=features
        ).loss
        for features in (read, None)
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


def test_what_is_there_is_not_written_again(
    found: Target,
    draft: DFlashDraftModel,
    examples: list[Example],
    written: FeatureCache,
    monkeypatch,
) -> None:
    before = {path: path.stat().st_mtime_ns for path in files(written)}
    calls: list[Example] = []
    monkeypatch.setattr(
        module, "features_alone", lambda *args: calls.append(args[2]) or features_alone(*args)
    )
    FeatureCache(written.folder).write(found, draft.config, examples, num_likely=64)
    assert not calls
    more = Example.from_pair([5, 6], [7, 8])
    cache = FeatureCache(written.folder)
    cache.write(found, draft.config, [more, *examples, more], num_likely=64)
    assert calls == [more]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert all(example in FeatureCache(written.folder) for example in [more, *examples])
    assert Example.from_pair([5, 6], [7, 9]) not in cache


def test_an_interrupted_write_goes_on(
    found: Target,
    draft: DFlashDraftModel,
    examples: list[Example],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*args: Any) -> Features:
        if args[2] is examples[2]:
            raise KeyboardInterrupt
        return features_alone(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "features_alone", stop)
        with pytest.raises(KeyboardInterrupt):
            FeatureCache(tmp_path).write(found, draft.config, examples)
    assert [example in FeatureCache(tmp_path) for example in examples] == [True, True, False]
    FeatureCache(tmp_path).write(found, draft.config, examples)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert not list(tmp_path.glob("*.partial"))


def test_processes_of_one_number_write_a_file_at_once(tmp_path: Path) -> None:
    """As those of two nodes may have it, each in a container of its own."""
    cache = FeatureCache(tmp_path)

    def write(partial: Path) -> None:
        partial.write_text("mine")
        cache._save("x", lambda other: other.write_text("theirs"))

    cache._save("x", write)
    assert (tmp_path / "x").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(
    written: FeatureCache, examples: list[Example], keep: int
) -> None:
    path = files(written)[1]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=r"expected whole features in .*; delete the file"
    ) as error:
        FeatureCache(written.folder).read(examples, collate(examples))
    assert str(path) in str(error.value)


def test_a_changed_file_is_named(written: FeatureCache, examples: list[Example]) -> None:
    path = files(written)[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ValueError,
        match=r"expected whole features in .*, got 'other bytes than were written'; delete the file",
    ) as error:
        FeatureCache(written.folder).read(examples, collate(examples))
    assert str(path) in str(error.value)


def test_another_target_is_refused(
    target: Qwen3ForCausalLM,
    draft: DFlashDraftModel,
    examples: list[Example],
    written: FeatureCache,
) -> None:
    found, cache = find_target(target), FeatureCache(written.folder)

    def identity() -> str:
        return " ".join([*target_identity(target).values(), "torch.float32"])

    first, weight = identity(), target.model.layers[1].mlp.up_proj.weight
    cache.check(found, draft.config, num_likely=64)
    cache.check(found, draft.config)
    with pytest.raises(
        ValueError,
        match=r"expected features with num_likely 65 in .*features.json, got 64; use the",
    ):
        cache.check(found, draft.config, num_likely=65)
    for place in ((slice(None), slice(None)), (3, 5)):  # all of it, and one number alone
        before = weight.detach().clone()
        with torch.no_grad():
            weight[place] += 0.25
        assert identity() != first
        for call in (cache.check, lambda *args: cache.write(*args, examples)):
            with pytest.raises(
                ValueError,
                match=rf"expected features with target '{identity()}' in .*, got '{first}'",
            ):
                call(found, draft.config)
        with torch.no_grad():
            weight.copy_(before)
    draft.config.target_layer_ids = [0, 1]
    with pytest.raises(
        ValueError,
        match=r"features with target_layer_ids \[0, 1\] in .*, got \[0, 2\]; use the target",
    ):
        cache.check(found, draft.config)
    for text, message in (
        (b"{", r"expected JSON in .*features.json, got .*delete the folder"),
        (
            b'{"a": "\xff"}',
            r"expected a JSON object in .*features.json, got a file that cannot be re",
        ),
    ):
        (written.folder / "features.json").write_bytes(text)
        with pytest.raises(ValueError, match=message):
            cache.check(found, draft.config)


def test_missing_features_are_refused(
    written: FeatureCache, draft: DFlashDraftModel, found: Target, tmp_path: Path
) -> None:
    other = Example.from_pair([5, 6], [7, 8, 9])
    with pytest.raises(
        ValueError,
        match=r"expected features of every example in .*, got 'none of an example of 5 tokens",
    ):
        written.read([other], collate([other]))
    batch = collate([other])
    written.write(found, draft.config, [other], num_likely=1)
    next_ids = FeatureCache(written.folder).read([other], batch).next_ids
    assert next_ids is not None
    assert next_ids.shape[-1] == 48, "the folder has more of them"
    less = FeatureCache(tmp_path / "less")
    less.write(found, draft.config, [other], num_likely=1)
    options = {"features": less.read([other], batch), "objective": "kl"}
    anchors, weights = all_anchors(batch.loss_mask, 6), decay_weights(6, 3.0)
    with pytest.raises(
        ValueError,
        match=r"the target's 48 most likely next tokens, got 1; write them with num_likely=48",
    ):
        batch_loss(draft, found, batch, anchors, weights, **options)


def test_a_full_disk_is_said_before_and_when_it_happens(
    found: Target,
    draft: DFlashDraftModel,
    examples: list[Example],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "new" / "features"
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(
            ValueError,
            match=r"expected room for 0\.00 GB of features in .*features, got '0\.00 GB'; choose",
        ):
            FeatureCache(folder).write(found, draft.config, examples)
    assert not folder.exists()

    def fail(tensors: object, path: Path, **kwargs: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", fail)
        with pytest.raises(
            OSError,
            match=r"expected room for .*\.safetensors, got .*No space left on device; make some",
        ):
            FeatureCache(folder).write(found, draft.config, examples)
    assert [path.name for path in folder.iterdir()] == ["features.json"]
    FeatureCache(folder).write(found, draft.config, examples)
    assert all(example in FeatureCache(folder) for example in examples)


def test_room_is_for_what_all_processes_miss(
    found: Target,
    draft: DFlashDraftModel,
    examples: list[Example],
    written: FeatureCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What others have put into the folder gives no room to an example that is not there."""
    length = sum(len(example.input_ids) for example in examples)
    new = Example.from_pair([5] * (length - 5), [7, 8])
    needed = len(new.input_ids) * bytes_per_token(draft.config, found.model.dtype, 64)
    usage = shutil.disk_usage(written.folder)

    def write(free: int, num_writers: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
            cache = FeatureCache(written.folder)
            every = [*examples, new]
            cache.write(found, draft.config, every, num_likely=64, num_writers=num_writers)

    for free, num_writers in ((needed - 1, 1), (2 * needed - 1, 2)):
        with pytest.raises(ValueError, match=r"expected room for .* GB of features in"):
            write(free, num_writers)
    write(2 * needed, 2)
    assert new in FeatureCache(written.folder)
    write(0, 2)


def test_a_file_is_plain_safetensors(written: FeatureCache) -> None:
    assert json.loads((written.folder / "features.json").read_text())["target_layer_ids"] == [0, 2]
    with safe_open(files(written)[0], framework="pt") as file:
        assert set(file.keys()) == {"taps", "next_ids", "next_log_probs"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float8_keeps_outliers_and_zeros(dtype: torch.dtype) -> None:
    """Each tap of each token has a scale, so that a number is 1/16 off at most, or small beside its tap's largest."""
    states = torch.randn(5, 3 * 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    states[0] = 0
    states[1, 7] = 6e4
    states[2] *= 1e-4
    states[3, 40] = -3e3
    numbers, scales = to_float8(states, 3)
    assert numbers.dtype == torch.float8_e4m3fn
    assert scales.dtype == dtype
    assert scales.shape == (5, 3)
    read = from_float8(numbers, scales)
    assert read.dtype == dtype
    assert not read[0].any()
    taps, found = (some.double().unflatten(-1, (3, -1)) for some in (states, read))
    largest = taps.abs().amax(-1, keepdim=True)
    bound = torch.maximum(taps.abs() * (2**-4 + 2**-7), largest / 448 * 2**-9)
    assert ((found - taps).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_features_are_read_in_the_targets_dtype(
    dtype: torch.dtype,
    target: Qwen3ForCausalLM,
    draft: DFlashDraftModel,
    examples: list[Example],
    tmp_path: Path,
) -> None:
    found = find_target(target.to(dtype))
    cache = FeatureCache(tmp_path, "float8")
    cache.write(found, draft.config, examples, num_likely=4)
    for example in examples:
        wanted = features_alone(found, draft.config, example, 4)
        read = FeatureCache(tmp_path, "float8").read([example], collate([example]))
        assert read.taps.dtype == dtype
        assert read.taps[0].equal(from_float8(*to_float8(wanted.taps[0], 2)))
        assert read.next_ids.equal(wanted.next_ids)
        assert read.next_log_probs.equal(wanted.next_log_probs)
    size = bytes_per_token(draft.config, dtype, 4, "float8")
    assert size == 2 * (32 + dtype.itemsize) + 32
    with safe_open(files(cache)[0], framework="pt") as file:
        names = ("taps", "scales", "next_ids", "next_log_probs")
        tensors = [file.get_tensor(name) for name in names]
    assert sum(tensor.nbytes for tensor in tensors) == size * len(tensors[0])


@pytest.mark.parametrize("stored", ["auto", "float8"])
def test_features_of_another_dtype_are_refused(
    stored: str, found: Target, draft: DFlashDraftModel, examples: list[Example], tmp_path: Path
) -> None:
    other = {"auto": "float8", "float8": "auto"}[stored]
    cache = FeatureCache(tmp_path / "features", stored)
    cache.write(found, draft.config, examples)
    message = rf"expected features with feature_dtype '{other}' in .*features.json, got '{stored}'"
    with pytest.raises(ValueError, match=message):
        FeatureCache(cache.folder, other).write(found, draft.config, examples)
    # A file from another folder, or of a reader that has checked nothing
    with pytest.raises(ValueError, match=rf"expected {other} features in .*, got '{stored}'; read"):
        FeatureCache(cache.folder, other).read(examples, collate(examples))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_states_without_a_finite_float8_are_refused(
    value: float,
    found: Target,
    draft: DFlashDraftModel,
    examples: list[Example],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any) -> Features:
        features = features_alone(*args)
        features.taps[0, 1, 3] = value
        return features

    monkeypatch.setattr(module, "features_alone", broken)
    cache = FeatureCache(tmp_path, "float8")
    with pytest.raises(
        ValueError, match=r"expected states .* finite in float8, got 'inf or nan'; use"
    ):
        cache.write(found, draft.config, examples)
    assert not files(cache)
