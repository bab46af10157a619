"""Examples, batches and the target's own answers."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from dflash_hf.training.collators import POOL_BATCHES, collate, epoch_batches
from dflash_hf.training.example import Example
from dflash_hf.training.target_answers import regenerate_answers

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a> {% generation %}{{ m['content'] }} <e>"
    "{% endgeneration %} {% else %}<u> {{ m['content'] }} {% endif %}{% endfor %}"
)


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<u>", "<a>", "<e>", "one", "two", "three", "four"]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<e>")
    fast.chat_template = template
    return fast


MESSAGES = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three four"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "one"},
]


def test_messages_mark_what_the_assistant_writes() -> None:
    example = Example.from_messages(make_tokenizer(TEMPLATE), MESSAGES)
    assert example.input_ids == [1, 4, 5, 2, 6, 7, 3, 1, 5, 2, 4, 3]
    assert example.loss_mask == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert example.prompt_length() == 4


@pytest.mark.filterwarnings("ignore")
def test_a_template_without_markers_is_refused() -> None:
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ValueError, match=r"expected a chat template with \{% generation %\}"):
        Example.from_messages(make_tokenizer(plain), MESSAGES)


def test_pairs() -> None:
    example = Example.from_pair([5, 6], [7, 8, 3])
    assert (example.input_ids, example.loss_mask) == ([5, 6, 7, 8, 3], [0, 0, 1, 1, 1])
    assert Example.from_pair([5, 6], []).prompt_length() == 2
    with pytest.raises(ValueError, match="expected a loss_mask of 2 entries"):
        Example(input_ids=[1, 2], loss_mask=[1])


def test_collate_pads_on_the_right() -> None:
    batch = collate([Example.from_pair([5, 6], [7]), Example.from_pair([5], [])], pad_token_id=9)
    assert batch.input_ids.tolist() == [[5, 6, 7], [5, 9, 9]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1], [0, 0, 0]]


def test_batches_cover_an_epoch_and_are_of_similar_length() -> None:
    lengths = torch.randint(
        1, 1000, (4 * POOL_BATCHES * 6 + 3,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    batches = epoch_batches(lengths, 4, seed=1, epoch=0)
    assert sorted(index for chosen in batches for index in chosen) == list(range(len(lengths)))
    spread = sum(max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches) / len(
        batches
    )
    assert spread < 200, "a random batch of four spreads over 600"
    assert batches == epoch_batches(lengths, 4, seed=1, epoch=0)
    assert batches != epoch_batches(lengths, 4, seed=1, epoch=1)
    assert batches != epoch_batches(lengths, 4, seed=2, epoch=0)


@torch.no_grad()
def test_regenerated_answers_are_greedy_whatever_is_guessed(
    target: Qwen3ForCausalLM,
) -> None:
    target = target.double()
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(0, 47, (length,), generator=generator).tolist() for length in (3, 8, 1, 5)
    ]
    options = {"max_new_tokens": 12, "eos_token_id": [3, 30], "pad_token_id": 0}
    answers = regenerate_answers(target, prompts, **options, batch_size=3)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and (len(ids) == len(prompt) or ids[-1] not in (3, 30)):
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer == ids[len(prompt) :]
    guesses = [answers[0], [*answers[1][:-1], 46], [], answers[3]]
    calls: list[int] = []
    generate = target.generate
    target.generate = lambda **kwargs: (calls.append(len(kwargs["input_ids"])), generate(**kwargs))[
        1
    ]
    assert regenerate_answers(target, prompts, **options, batch_size=3, guesses=guesses) == answers
    assert sum(calls) == 2, "only the prompts without a right guess are generated"


def test_labels_of_a_processor_are_no_input_of_the_target() -> None:
    example = Example.from_pair({"input_ids": [[5, 6]], "labels": [[5, 6]]}, [7])
    assert example.model_inputs == {}
