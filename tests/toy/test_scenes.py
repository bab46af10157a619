"""The drawn pictures, the questions about them, and the vision target's training pass."""

import re

import pytest
import torch
from PIL import Image
from scene_tasks import PICTURE_KINDS, VISION_KINDS, VisionKind, make_vision_sample
from scenes import BACKGROUNDS, CELL, COLOURS, Chart, Scene, Sign
from train_vision_target import fast_logits, make_config, pad_batch
from transformers import PreTrainedTokenizerBase, Qwen3VLForConditionalGeneration
from vision_processor import IMAGE, MERGE, build_vision_tokenizer, encode_sample, patches


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer trained on fewer texts than the stored one."""
    return build_vision_tokenizer(per_kind=600)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_samples_are_deterministic_and_splits_disjoint(kind: VisionKind) -> None:
    """The same arguments give the same sample; no conversation is in both splits."""
    first, again = (make_vision_sample(kind, "train", 7) for _ in range(2))
    assert (first.turns, first.answer) == (again.turns, again.answer)
    train, held_out = (
        {make_vision_sample(kind, split, i).turns for i in range(200)}
        for split in ("train", "heldout")
    )
    assert not train & held_out
    assert len(train) > 190


def _nearest(pixel: tuple[int, int, int], names: dict[str, tuple[int, int, int]]) -> str:
    return min(
        names, key=lambda name: sum(abs(a - b) for a, b in zip(pixel, names[name], strict=True))
    )


def _pixel(image: Image.Image, x: float, y: float) -> tuple[int, int, int]:
    value = image.getpixel((int(x), int(y)))
    assert isinstance(value, tuple)
    return value[0], value[1], value[2]


def test_descriptions_say_what_is_drawn() -> None:
    """Every object is painted in its colour where the answer puts it, and cells without one are background."""
    for index in range(60):
        sample = make_vision_sample("describe", "train", index)
        scene = sample.pictures()[0]
        assert isinstance(scene, Scene)
        image = scene.draw()
        assert image.size == (scene.columns * CELL, scene.rows * CELL)
        said = re.findall(r"At the (.+?) there is a (big|small) (\w+) (\w+)\.", sample.answer)
        assert len(said) == len(scene.things)
        taken = {}
        for thing, (place, size, colour, shape) in zip(scene.things, said, strict=True):
            assert (place, size, shape) == (
                scene.place(thing.row, thing.column),
                thing.size,
                thing.shape,
            )
            taken[thing.row, thing.column] = colour
        for row in range(scene.rows):
            for column in range(scene.columns):
                cell = image.crop(
                    (column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL)
                )
                counts = cell.getcolors(CELL * CELL)
                assert counts is not None
                painted = [(n, rgb) for n, rgb in counts if rgb in COLOURS.values()]
                if (row, column) in taken:
                    assert _nearest(max(painted)[1], COLOURS) == taken[row, column]  # type: ignore[arg-type]
                else:
                    assert not painted
                    assert counts == [(CELL * CELL, BACKGROUNDS[scene.background])]


def test_counts_are_right() -> None:
    """The number at the end of a count is the number of objects that the question asks for."""
    names = ("no", "one", "two", "three", "four", "five")
    for index in range(100):
        sample = make_vision_sample("count", "train", index)
        scene = sample.pictures()[0]
        assert isinstance(scene, Scene)
        asked = re.fullmatch(r"How many (big |small |)objects are there\?", sample.turns[0].text)
        assert asked
        right = sum(thing.size in asked[1] or not asked[1] for thing in scene.things)
        concluded = re.search(rf"So there (?:is|are) (\w+) {asked[1]}objects?\.$", sample.answer)
        assert concluded
        assert concluded[1] == names[right]


def test_neighbours_are_right() -> None:
    """What is left of, right of, above or below a place, from the cells."""
    steps = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
    for index in range(100):
        sample = make_vision_sample("relate", "train", index)
        scene = sample.pictures()[0]
        assert isinstance(scene, Scene)
        cells = {
            scene.place(row, column): (row, column)
            for row in range(scene.rows)
            for column in range(scene.columns)
        }
        assert len(cells) == scene.rows * scene.columns
        asked = re.fullmatch(
            r"What is (left of|right of|above|below) the ([a-z ]+)\?", sample.turns[0].text
        )
        assert asked
        there = tuple(map(sum, zip(cells[asked[2]], steps[asked[1]], strict=True)))
        found = [thing.name for thing in scene.things if (thing.row, thing.column) == there]
        end = f"find a {found[0]} there." if found else "find nothing there."
        assert sample.answer.endswith(end)


def test_charts_and_signs() -> None:
    """Bars are as high as their values, in order; a sign's text is in its answer and in its picture."""
    for index in range(60):
        chart = make_vision_sample("chart", "train", index).pictures()[0]
        assert isinstance(chart, Chart)
        image = chart.draw()
        step = (3 * CELL - 28) / len(chart.bars)
        for at, (colour, value) in enumerate(chart.bars):
            x = 14 + (at + 0.5) * step
            assert _pixel(image, x, 3 * CELL - 28 - value * 34 + 4) == COLOURS[colour]
            assert _pixel(image, x, 3 * CELL - 28 - value * 34 - 38) not in COLOURS.values()
        sample = make_vision_sample("chart", "train", index)
        said = re.search(r"the bars are (.+?)\.", sample.answer)
        assert said
        assert said[1] == ", ".join(f"{value} {colour}" for colour, value in chart.bars)
        concluded = re.search(r"The (tallest|shortest) one has (\d) and is (\w+)\.", sample.answer)
        if concluded:
            best = (max if concluded[1] == "tallest" else min)(chart.bars, key=lambda bar: bar[1])
            assert (concluded[3], int(concluded[2])) == best
        sample = make_vision_sample("read", "train", index)
        sign = sample.pictures()[0]
        assert isinstance(sign, Sign)
        assert f" says {sign.text}." in sample.answer
        board = sign.draw().crop((20, 20, 4 * CELL - 20, 2 * CELL - 20))
        assert COLOURS[sign.colour] in [rgb for _, rgb in board.getcolors(2**18) or []]
        # Nothing is cut off by the rim.
        for edge in (0, board.width - 1):
            assert all(
                _pixel(board, edge, y) == BACKGROUNDS[sign.background] for y in range(board.height)
            )


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_encoding(tokenizer: PreTrainedTokenizerBase, kind: VisionKind) -> None:
    """One image token for each merged patch; the mask covers the answers of all turns; everything fits."""
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    for index in range(8):
        sample = make_vision_sample(kind, "train", index)
        encoded = encode_sample(tokenizer, sample)
        assert bool(sample.pictures()) == (kind in PICTURE_KINDS)
        assert encoded.input_ids.count(image_id) == len(encoded.pixel_values) // MERGE**2  # type: ignore[arg-type]
        assert len(encoded.input_ids) < 512
        said = [turn.text for turn in sample.turns if turn.role == "assistant"] + [sample.answer]
        marked = [
            token for token, flag in zip(encoded.input_ids, encoded.is_answer, strict=True) if flag
        ]
        assert tokenizer.decode(marked) == "".join(f"{text}{tokenizer.eos_token}" for text in said)


def test_images_land_on_whole_cells() -> None:
    """The processor's resize keeps the grid: a cell is two by two image tokens."""
    for index in range(20):
        scene = make_vision_sample("describe", "train", index).pictures()[0]
        assert isinstance(scene, Scene)
        _, grid = patches([scene])
        assert grid.tolist() == [[1, scene.rows * 4, scene.columns * 4]]


def test_fast_forward_matches_the_model(tokenizer: PreTrainedTokenizerBase) -> None:
    """The training forward pass agrees with the general one, with pictures of two sizes and a row without one."""
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(make_config(tokenizer))
    for name, parameter in model.named_parameters():
        if "visual" in name:  # so that what a picture says is heard
            torch.nn.init.normal_(parameter, std=0.1)
    rows = [
        encode_sample(tokenizer, make_vision_sample(kind, "train", 0))
        for kind in ("compare", "read", "talk", "chart")
    ]
    batch = pad_batch(rows, tokenizer.pad_token_id, model.config.image_token_id, 0.1)  # type: ignore[arg-type]
    real = batch.attention_mask_BS.bool()
    logits = []
    gradients = []
    for fast in (False, True):
        model.zero_grad()
        if fast:
            out = fast_logits(model, batch).float()
        else:
            out = model(
                input_ids=batch.input_ids_BS,
                attention_mask=batch.attention_mask_BS,
                mm_token_type_ids=(batch.input_ids_BS == model.config.image_token_id).int(),
                pixel_values=batch.pixel_values,
                image_grid_thw=batch.image_grid_thw,
                use_cache=False,
            ).logits
        torch.nn.functional.cross_entropy(out[real], batch.input_ids_BS[real]).backward()
        logits.append(out[real].detach())
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert (
        torch.nn.functional.cosine_similarity(logits[0].flatten(), logits[1].flatten(), dim=0)
        > 0.999
    )
    assert torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.99


def test_unknown_kind_is_refused() -> None:
    """The error names what is allowed."""
    with pytest.raises(ValueError, match="expected a kind among"):
        make_vision_sample("poem", "train", 0)  # type: ignore[arg-type]
