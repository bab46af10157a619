"""Examples with pictures: every vision family gives the features of each row alone, and the walk is `generate`'s."""

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_outputs

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target
from dflash_hf.training import (
    DFlashTrainer,
    DFlashTrainingArguments,
    Example,
    regenerate_answers,
    walked_acceptance,
)
from dflash_hf.training.collators import collate
from dflash_hf.training.forward import forward_inputs, target_features
from helpers.training import records
from helpers.vision import (
    IMAGE,
    VISION,
    VISION_HYBRIDS,
    Grid,
    shallow_vision_target,
    vision_prompts,
    vision_target,
)
from helpers.whole_blocks import use_whole_blocks
from tiny import tiny_draft

# One picture, none, several of different sizes, one of another size.
ROWS: list[list[Grid]] = [[(4, 4)], [], [(2, 8), (6, 4)], [(8, 4)]]
END = 3


def prompts_of(target: PreTrainedModel, name: str) -> list[Example]:
    """One prompt per row, each laid out as the processor gives it for that row alone."""
    return [
        Example.from_pair(vision_prompts(target, name, [row], seed, words=(3 + 2 * seed,)), [])
        for seed, row in enumerate(ROWS)
    ]


def answered(prompts: list[Example]) -> list[Example]:
    """Prompts with random answers of different lengths, the shortest behind the longest prompt."""
    generator = torch.Generator().manual_seed(9)
    return [
        prompt.with_answer(torch.randint(4, 40, (12 - 3 * at,), generator=generator).tolist())
        for at, prompt in enumerate(prompts)
    ]


@pytest.fixture(params=[*VISION, *VISION_HYBRIDS])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def test_a_mixed_batch_gives_the_features_of_each_row_alone(name: str) -> None:
    target = vision_target(name)
    examples = answered(prompts_of(target, name))
    found = find_target(target)
    batch = collate(examples)
    assert not batch.attention_mask.all(), "no row is padded: the case shows nothing"
    together = target_features(found, [0, 2], batch, num_likely=1)
    for row, example in enumerate(examples):
        length, prompt = len(example.input_ids), example.prompt_length()
        inputs: dict[str, Tensor] = {"input_ids": torch.tensor([example.input_ids])}
        for key, value in example.model_inputs.items():
            inputs[key] = value[None] if value.shape == (length,) else value
        if name == "paligemma":
            inputs["token_type_ids"] = torch.nn.functional.pad(
                vision_prompts(target, name, [ROWS[row]], row, words=(3 + 2 * row,))[
                    "token_type_ids"
                ],
                (0, length - prompt),
                value=1,  # what follows a prompt is causal
            )
        output = target(**inputs, output_hidden_states=True)
        alone = torch.cat([output.hidden_states[1], output.hidden_states[3]], dim=-1)[0]
        # Recurrent layers compute in float32 in any dtype
        atol = 1e-5 if name in VISION_HYBRIDS else 1e-9
        torch.testing.assert_close(together.taps[row, :length], alone, rtol=0, atol=atol)
        assert torch.equal(together.next_ids[row, :length, 0], output.logits[0].argmax(dim=-1))
    blind = collate([Example(input_ids=e.input_ids, loss_mask=e.loss_mask) for e in examples])
    differs = (target_features(found, [0, 2], blind).taps - together.taps).abs().amax(dim=(1, 2))
    assert [bool(d > 1e-3) for d in differs][::2] == [True, True], "the pictures do nothing"


@pytest.mark.parametrize("name", ["qwen3-vl", "smolvlm"])
@torch.no_grad()
def test_only_tapped_layers_are_kept_and_no_image_features(name: str) -> None:
    target = vision_target(name)
    found = find_target(target)
    outputs: dict[int | str, weakref.ref[Tensor]] = {}
    alive: list[set[int | str]] = []

    def keep(key: int | str) -> Callable[..., None]:
        def look(module: nn.Module, args: object, output: Tensor) -> None:
            outputs[key] = weakref.ref(output[0] if isinstance(output, tuple) else output)

        return look

    for at, layer in enumerate(found.layers):
        layer.register_forward_hook(keep(at))
    towers = [
        m for m in target.modules() if isinstance(m, nn.ModuleList) and m[0] is not found.layers[0]
    ]
    vision = max(towers, key=len)[-1]
    vision.register_forward_hook(keep("picture"))
    found.head.register_forward_pre_hook(
        lambda *_: alive.append({k for k, ref in outputs.items() if ref() is not None})
    )
    batch = collate(answered(prompts_of(target, name)))
    taps = target_features(found, [0, 2], batch, num_likely=1).taps
    assert set(outputs) == {0, 1, 2, 3, "picture"}
    # Newer releases hand on what the tower gave in the output of the model around the decoder.
    holds_pictures = name == "qwen3-vl" and hasattr(
        modeling_outputs, "MultimodalCausalLMOutputWithPast"
    )
    allowed = {3, "picture"} if holds_pictures else {3}
    assert alive[0] <= allowed, "beside the joined taps only what the head is given"
    assert taps.shape[-1] == 2 * 32
    assert all(ref() is None for ref in outputs.values())
    outputs.clear()
    assert torch.equal(target_features(found, [0, 2], batch).taps, taps)
    assert set(outputs) == {0, 1, 2, "picture"}, "nothing behind the last tap runs"
    assert len(alive) == 1
    assert all(ref() is None for ref in outputs.values())


def similar_pair(name: str) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """A target whose greedy text is repetitive enough that a random draft is sometimes right, and answers end."""
    target = shallow_vision_target(name, seed=1)
    head = find_target(target).head
    with torch.no_grad():
        head.weight[6:] *= 0.05
        draft = tiny_draft(target, 6)
        draft.norm.weight *= 4
    return target, draft


@torch.no_grad()
def test_the_walk_is_that_of_generate(name: str) -> None:
    target, draft = similar_pair(name)
    prompts = prompts_of(target, name)
    options = {"max_new_tokens": 19, "eos_token_id": END, "pad_token_id": 0}
    answers = regenerate_answers(target, prompts, **options)
    examples = [prompt.with_answer(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    walked = walked_acceptance(draft, find_target(target), examples)
    use_whole_blocks(draft)
    for prompt, committed in zip(prompts, walked.committed, strict=True):
        single = collate([prompt])
        target.generate(
            **forward_inputs(target, single), do_sample=False, assistant_model=draft, **options
        )
        assert [committed] == draft.last_stats.num_committed
    together = collate(prompts, padding_side="left")
    target.generate(
        **forward_inputs(target, together), do_sample=False, assistant_model=draft, **options
    )
    assert walked.committed == draft.last_stats.num_committed
    assert len({count for row in walked.committed for count in row}) > 1, "the draft is never right"


@torch.no_grad()
def test_regenerated_answers_are_those_of_each_prompt_alone(name: str) -> None:
    target, _ = similar_pair(name)
    prompts = prompts_of(target, name)
    options = {"max_new_tokens": 12, "eos_token_id": [END, 30], "pad_token_id": 0}
    answers = regenerate_answers(target, prompts, **options, batch_size=3)
    alone = [
        vision_prompts(target, name, [row], at, words=(3 + 2 * at,)) for at, row in enumerate(ROWS)
    ]
    for inputs, answer in zip(alone, answers, strict=True):
        out = target.generate(**inputs, do_sample=False, **options)[
            0, inputs["input_ids"].shape[1] :
        ].tolist()
        assert answer == out
    wrong = [*answers[2][:-1], (answers[2][-1] + 1) % 50]
    guesses = [answers[0], answers[1], wrong, []]
    calls: list[int] = []
    generate = target.generate
    target.generate = lambda **kwargs: (calls.append(len(kwargs["input_ids"])), generate(**kwargs))[
        1
    ]
    # What a processor gives and an example are the same prompt.
    assert (
        regenerate_answers(target, [*alone[:2], *prompts[2:]], **options, guesses=guesses)
        == answers
    )
    assert calls == [2], "only the prompts without a right guess are generated"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@torch.no_grad()
def test_embedding_and_head_are_found_from_the_model(name: str, tied: bool) -> None:
    target = vision_target(name, tie_word_embeddings=tied)
    found = find_target(target)
    assert (found.head.weight is found.embedding.weight) is tied
    attentions = [layer.self_attn for layer in found.layers if hasattr(layer, "self_attn")]
    assert attentions
    assert all(attention.config is found.config for attention in attentions), (
        "layers of the vision tower"
    )
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["ids" if module is found.embedding else "logits"] = (
            args[0] if module is found.embedding else output
        )

    for module in (found.embedding, found.head):
        module.register_forward_hook(look)
    inputs = vision_prompts(target, name, [[(4, 4)]], 0)
    logits = target(**inputs).logits
    is_text = inputs["input_ids"] != IMAGE
    assert torch.equal(seen["ids"][is_text], inputs["input_ids"][is_text])
    assert torch.equal(seen["logits"].argmax(dim=-1), logits.argmax(dim=-1))


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5-vl", "gemma3", "smolvlm"])
def test_a_draft_trains_on_text_and_images(name: str, tmp_path: Path) -> None:
    target = vision_target(name).float()
    examples = answered(prompts_of(target, name))
    for example in examples:
        example.model_inputs.update(
            {k: v.float() for k, v in example.model_inputs.items() if v.is_floating_point()}
        )
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=24,
        per_device_train_batch_size=3,
        learning_rate=5e-3,
        logging_steps=2,
        disable_tqdm=True,
    )
    draft = tiny_draft(target, 5)
    data = {"train_dataset": examples, "eval_dataset": examples}
    trainer = DFlashTrainer(model=draft, target=target, args=args, **data)
    trainer.train()
    losses = [record["loss"] for record in records(trainer)]
    assert losses[-1] < 0.95 * losses[0]
    assert trainer.evaluate()["eval_acceptance_length"] > 1
