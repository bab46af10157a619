"""Transformers' pipelines with a draft, for text and for pictures: the same answers as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from dflash_hf import DFlashDraftModel
from tiny import OracleDraft, oracle_draft

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Hello! How are you today?", "Count to ten.", "What is 3+4?")
]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, DFlashDraftModel, Any]:
    target = AutoModelForCausalLM.from_pretrained("demos/toy/target")
    draft = DFlashDraftModel.from_pretrained("demos/toy/draft")
    tokenizer = AutoTokenizer.from_pretrained("demos/toy/target", padding_side="left")
    return target, draft, tokenizer


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_the_same(pair: tuple[Any, DFlashDraftModel, Any], batch_size: int) -> None:
    target, draft, tokenizer = pair
    settings = {"max_new_tokens": 9, "do_sample": False, "batch_size": batch_size}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    ours = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    draft.last_stats = None
    # First: what pipelines do that is deprecated is said once, of these
    wanted = plain(CHATS, **settings)
    assert ours(CHATS, **settings) == wanted
    assert draft.last_stats is not None
    assert len(draft.last_stats.num_committed) == batch_size
    texts = ["Hello there", "One two three", "Once"]
    assert ours(texts, **settings) == plain(texts, **settings)
    assert plain(texts, **settings, assistant_model=draft) == plain(texts, **settings)


def test_a_draft_without_a_vocabulary_takes_the_tokenizer(
    pair: tuple[Any, DFlashDraftModel, Any],
) -> None:
    target, draft, tokenizer = pair
    torch.manual_seed(0)
    config = type(draft.config)(**{**draft.config.to_dict(), "vocab_size": None})
    unstated = DFlashDraftModel(config).eval()
    names = {"model": target, "tokenizer": tokenizer, "assistant_model": unstated}
    with pytest.raises(ValueError, match="assistant tokenizer"):
        pipeline("text-generation", **names)
    ours = pipeline("text-generation", **names, assistant_tokenizer=tokenizer)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    wanted = plain("Hello there", max_new_tokens=10)
    assert ours("Hello there", max_new_tokens=10) == wanted


def test_special_tokens_are_the_targets_and_never_saved(
    pair: tuple[Any, DFlashDraftModel, Any],
) -> None:
    target, draft, _ = pair
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(target.config, name) == getattr(draft.config, name)
        assert name not in draft.config.to_dict()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[Any]]:
    pytest.importorskip("PIL")
    from dflash_hf.processing_qwen3_vl import Qwen3VLProcessor
    from helpers.processors import picture, published_folder, qwen_target

    processor = Qwen3VLProcessor.from_pretrained(
        published_folder(tmp_path_factory.mktemp("qwen3-vl"))
    )
    return qwen_target(processor), processor, [picture(16, 24), picture(40, 16, 1)]


def talk(*turns: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant: lists of texts and pictures."""
    parts = [
        [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": part}
            for part in turn
        ]
        for turn in turns
    ]
    return [
        {"role": ("user", "assistant")[index % 2], "content": part}
        for index, part in enumerate(parts)
    ]


def both(pipe: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, OracleDraft]:
    """What a pipeline says with and without an oracle that knows the ids it gives without one."""
    settings = {"max_new_tokens": 12, "do_sample": False}
    found = pipe(*args, **kwargs, return_tensors=True, generate_kwargs=dict(settings))
    pad = pipe.processor.tokenizer.pad_token_id
    rows = [row["generated_token_ids"].tolist() for row in found]
    # Ids in front that are padding are not in the text.
    draft = oracle_draft(
        pipe.model, [[token for token in row if token != pad] for row in rows], 0, 5
    )
    plain = pipe(*args, **kwargs, generate_kwargs=dict(settings))
    return (
        pipe(*args, **kwargs, generate_kwargs={**settings, "assistant_model": draft}),
        plain,
        draft,
    )


def test_answers_about_images_are_the_same(pictures: tuple[Any, Any, list[Any]]) -> None:
    target, processor, (one, wide) = pictures
    pipe: Any = pipeline("image-text-to-text", model=target, processor=processor)
    chats = [
        talk(["hello"]),
        talk([one, "what?"]),
        talk([one, "and", wide, "differ?"]),
        talk([wide, "what?"], ["a dog."], ["and", one, "?"]),
        talk([wide, "what?"], ["a "]),  # the answer is gone on with
    ]
    for chat in chats:
        ours, plain, draft = both(pipe, text=chat)
        assert ours == plain
        assert len(plain[0]["generated_text"][-1]["content"]) > 0
        assert 1.2 < draft.last_stats.acceptance_length < 5
    draft = oracle_draft(target, [[0]], 0, 5)
    settings = {"max_new_tokens": 12, "do_sample": False}
    plain = pipe(text=chats, generate_kwargs=dict(settings))
    assert pipe(text=chats, generate_kwargs={**settings, "assistant_model": draft}) == plain
    assert len({str(answer) for answer in plain}) == len(chats)


def test_several_rows_with_images_are_the_same(pictures: tuple[Any, Any, list[Any]]) -> None:
    target, processor, (one, wide) = pictures
    pipe: Any = pipeline("image-text-to-text", model=target, processor=processor)
    sign = "<|vision_start|><|image_pad|><|vision_end|>"
    texts = [f"{sign}what?", "hello there", f"{sign}or{sign}?"]
    ours, plain, draft = both(pipe, text=texts, images=[one, wide, one])
    assert ours == plain
    assert len(draft.last_stats.num_committed) == 3
    assert 1.2 < draft.last_stats.acceptance_length < 5
    # Chats that are collated by the pipeline itself.
    chats = [talk([picture, "what?"]) for picture in (one, one.rotate(180))]
    settings = {"max_new_tokens": 12, "do_sample": False}
    draft = oracle_draft(target, [[0], [0]], 0, 5)
    plain = pipe(text=chats, batch_size=2, generate_kwargs=dict(settings))
    assert (
        pipe(text=chats, batch_size=2, generate_kwargs={**settings, "assistant_model": draft})
        == plain
    )
    assert len(draft.last_stats.num_committed) == 2
