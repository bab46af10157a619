"""Which tokens are the assistant's where a chat template does not say it: those that the target would write."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflash_hf.pair.answers import encode_prompts
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.chat_template import ChatTemplate
from dflash_hf.training.example import Example
from dflash_hf.training.masks import assistant_turns, check_turns, groups_in_place
from helpers.templates import FAMILIES, LLAMA3, QWEN3, THOUGHTLESS, byte_tokenizer

CHAT = [
    {"role": "user", "content": "how many?"},
    {"role": "assistant", "content": "two, I think"},
    {"role": "user", "content": "two, I think, is wrong"},
    {"role": "assistant", "content": "then\n\nthree"},
    {"role": "user", "content": "and now?"},
]
THINKING = [
    {**turn, "content": f"<think>\nso {at}\n</think>\n\n{turn['content']}"}
    if turn["role"] == "assistant"
    else turn
    for at, turn in enumerate(CHAT)
]


def runs(tokenizer: Any, example: Example) -> list[tuple[int, str]]:
    """Where the answers of an example begin, and what they say."""
    found: list[tuple[int, list[int]]] = []
    for at, (token, marked) in enumerate(zip(example.input_ids, example.loss_mask, strict=True)):
        if marked and (at == 0 or not example.loss_mask[at - 1]):
            found.append((at, []))
        if marked:
            found[-1][1].append(token)
    return [(at, tokenizer.decode(ids)) for at, ids in found]


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    """What the target is given to answer messages."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)[
        "input_ids"
    ]


@pytest.mark.parametrize("name", ["smollm2", "llama3", "gemma", "mistral"])
def test_every_answer_is_marked_behind_its_prompt(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    example = Example.from_messages(tokenizer, CHAT)
    space = " " if name == "mistral" else ""
    found = runs(tokenizer, example)
    assert [text for _, text in found] == [
        f"{space}{CHAT[turn]['content']}{family.end}" for turn in (1, 3)
    ]
    for (start, _), turn in zip(found, (1, 3), strict=True):
        assert example.input_ids[:start] == prompt_ids(tokenizer, CHAT[:turn])
    whole = tokenizer.apply_chat_template(CHAT[:4])["input_ids"]
    assert example.input_ids == whole
    last = Example.from_messages(tokenizer, CHAT, turns=[3])
    assert runs(tokenizer, last) == found[1:]
    assert last.input_ids == whole
    first = Example.from_messages(tokenizer, CHAT, turns=[1])
    assert runs(tokenizer, first) == found[:1]
    template = ChatTemplate(tokenizer)
    assert groups_in_place(template.render, CHAT, assistant_turns(CHAT), template.ends()) == [
        [1, 3]
    ]


@pytest.mark.parametrize(
    ("options", "thinks"), [({}, True), ({}, False), ({"enable_thinking": False}, False)]
)
def test_qwen3_drops_what_earlier_turns_thought(options: dict[str, Any], thinks: bool) -> None:
    """So each answer has a sequence of its own, which is what the target was given and wrote then."""
    tokenizer = FAMILIES["qwen3"].tokenizer()
    chat = THINKING if thinks else CHAT
    with pytest.raises(
        ValueError,
        match=r"^expected a chat template that leaves turns as they were written, got one",
    ):
        Example.from_messages(tokenizer, chat, chat_template_kwargs=options)
    template = ChatTemplate(tokenizer, options)
    assert groups_in_place(template.render, chat, [1, 3], template.ends()) == [[1], [3]]
    for turn in (1, 3):
        example = Example.from_messages(tokenizer, chat, turns=[turn], chat_template_kwargs=options)
        ((start, text),) = runs(tokenizer, example)
        assert example.input_ids[:start] == prompt_ids(tokenizer, chat[:turn], **options)
        empty = "" if options else "<think>\n\n</think>\n\n"
        assert (
            text
            == (chat[turn]["content"] if thinks else empty + chat[turn]["content"]) + "<|im_end|>"
        )


def test_qwen3_keeps_thoughts_between_calls_of_tools() -> None:
    """Answers behind the user's last turn are written as they were: they share a sequence."""
    tokenizer = FAMILIES["qwen3"].tokenizer()
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nask\n</think>\n\ncall"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "<think>\ngood\n</think>\n\nfour"},
    ]
    template = ChatTemplate(tokenizer)
    assert groups_in_place(template.render, chat, [1, 3], template.ends()) == [[1, 3]]
    example = Example.from_messages(tokenizer, chat)
    assert [text for _, text in runs(tokenizer, example)] == [
        f"{chat[t]['content']}<|im_end|>" for t in (1, 3)
    ]


MARKS = {
    "smollm2": (
        "+ m['content'] + '<|im_end|>' + '\n'}}",
        "}}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
    ),
    "llama3": (
        "+ m['content'] | trim + '<|eot_id|>' }}",
        "}}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}"
        "{% endgeneration %}{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}",
    ),
    "gemma": (
        "+ m['content'] | trim + '<end_of_turn>\\n' }}",
        "}}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{% else %}{{ m['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}",
    ),
}
SAID = st.text(
    st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=12
).filter(lambda text: bool(text.strip()))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MARKS)), st.lists(SAID, min_size=2, max_size=6))
def test_found_as_marked(name: str, said: list[str]) -> None:
    """What is found without marks is what the same template marks."""
    chat = [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)
    ]
    plain = FAMILIES[name].tokenizer()
    marked = FAMILIES[name].tokenizer()
    old, new = MARKS[name]
    assert old in str(marked.chat_template)
    marked.chat_template = str(marked.chat_template).replace(old, new)
    expected = Example.from_messages(marked, chat)
    found = Example.from_messages(plain, chat)
    size = len(found.input_ids)
    assert found.input_ids == expected.input_ids[:size]
    assert found.loss_mask == expected.loss_mask[:size]
    assert not any(expected.loss_mask[size:])
    for turn in assistant_turns(chat):
        one = Example.from_messages(marked, chat, turns=[turn])
        assert runs(marked, one) == runs(plain, Example.from_messages(plain, chat, turns=[turn]))


@pytest.mark.parametrize("name", ["smollm2", "llama3"])
def test_a_list_of_texts_is_one_text_for_a_tokenizer(name: str) -> None:
    """Templates of models for text alone leave such a list out, refuse it, or write it as Python prints it."""
    tokenizer = FAMILIES[name].tokenizer()
    blocks = [{"type": "text", "text": "how"}, {"type": "text", "text": "many?"}]
    listed = [{**CHAT[0], "content": blocks}, *CHAT[1:4]]
    written = [{**CHAT[0], "content": "how\nmany?"}, *CHAT[1:4]]
    prompts = ChatDataset(
        [{"messages": m[:1]} for m in (written, listed)], tokenizer, answers=[[]] * 2
    )
    expected = prompt_ids(tokenizer, written[:1])
    assert [prompt.input_ids for prompt in prompts] == [expected, expected]
    assert list(prompts.lengths) == [len(expected)] * 2
    encoded = encode_prompts(tokenizer, [listed[:1]], torch.device("cpu"))
    assert encoded["input_ids"].tolist() == [expected]
    example = Example.from_messages(tokenizer, listed)
    assert example.input_ids == Example.from_messages(tokenizer, written).input_ids
    assert listed[0]["content"] == blocks, "the rows are not changed"


def test_what_cannot_be_told_is_refused() -> None:
    thoughtless = byte_tokenizer(THOUGHTLESS, ("<|User|>", "<|Assistant|>", "<e>"), "<e>")
    header = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    beginning = r"^expected a chat template with \{% generation %\} around assistant turns, or one that writes "
    for tokenizer, reason in (
        (
            thoughtless,
            "an answer behind its own generation prompt, got one that does neither for turn 1",
        ),
        (
            byte_tokenizer(header, ("<e>",), "<e>"),
            "what they say behind a generation prompt, got 'assistant: two, I ",
        ),
        (
            byte_tokenizer(
                QWEN3.replace("content }}", "'' }}").replace("+ content", "+ ''"), ("<e>",), "<e>"
            ),
            "what ",
        ),
    ):
        with pytest.raises(ValueError, match=beginning + reason):
            Example.from_messages(tokenizer, CHAT[:2])
    with pytest.raises(ValueError, match=r"^expected a chat template, got a \w+ without one"):
        Example.from_messages(byte_tokenizer(None, ("<e>",), "<e>"), CHAT[:2])
    smollm2 = FAMILIES["smollm2"].tokenizer()
    for turns in ([0], [3, 1], [7], []):
        with pytest.raises(ValueError, match=r"^expected turns of the assistant's, got \["):
            Example.from_messages(smollm2, CHAT, turns=turns)


def test_a_template_that_drops_a_turn_is_noticed() -> None:
    template = ChatTemplate(FAMILIES["qwen3"].tokenizer())
    check_turns(template.render(THINKING), THINKING)
    check_turns(template.render([{"role": "system", "content": "be\n kind "}, *CHAT]), [*CHAT])
    one_question = template.text.replace(
        "{%- else %}{{- '<|im_start|>' + m.role", "{%- elif loop.first %}{{- '' + m.role"
    )
    dropping = ChatTemplate(byte_tokenizer(one_question, ("<|im_end|>",), "<|im_end|>"))
    with pytest.raises(
        ValueError,
        match=r"^expected a chat template that writes every turn, got one .* turn 2 \(role u",
    ):
        check_turns(dropping.render(CHAT), CHAT)


def test_a_result_of_a_tool_may_be_written_in_json() -> None:
    """As Llama 3.1's template writes it."""
    plain = (
        "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim"
    )
    in_json = plain.replace("m['content'] | trim", "(m['content'] | tojson if m['role'] == 'tool'")
    in_json += " else m['content'] | trim)"
    tokenizer = FAMILIES["llama3"].tokenizer()
    tokenizer.chat_template = LLAMA3.replace(plain, in_json)
    assert tokenizer.chat_template != LLAMA3
    template = ChatTemplate(tokenizer)
    result = {"role": "tool", "content": '{"t": 3,\n "where": "Köln"}'}
    chat = [CHAT[0], CHAT[1], result, CHAT[3]]
    check_turns(template.render(chat), chat)
    text = template.render(chat).replace("3", "4", 1)
    with pytest.raises(ValueError, match=r"leaves out or changes turn 2 \(role tool\)"):
        check_turns(text, chat)
    with pytest.raises(ValueError, match=r"leaves out or changes turn 0 \(role user\)"):
        check_turns(template.render(chat), [{**result, "role": "user"}])


def test_a_token_with_a_letter_of_the_prompt_is_not_the_answers() -> None:
    """Words with their space, as most vocabularies have: the space behind "ASSISTANT:" is the prompt's."""
    words = [
        "<e>",
        "Ġhello",
        "Ġ",
        "hello",
        "USER:",
        "ASSISTANT:",
        "Ġthere",
        *"abcdeghilortASINTUR:Ġ",
    ]
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<e>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<e>")
    fast.chat_template = (
        "{% for m in messages %}{{ ('USER: ' if m.role == 'user' else 'ASSISTANT: ') + m.content + '<e>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
    )
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}]
    ((_, text),) = runs(fast, Example.from_messages(fast, chat))
    assert text.replace("Ġ", " ").split() == ["there", "<e>"], (
        "the first word is one token with the prompt's space"
    )
