"""An agent of smolagents with its own prompts: it calls tools over the server, and is told what they gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.scripted_server import InProcess, Script, random_pair

smolagents: Any = pytest.importorskip("smolagents")

# A template for calls and what they gave, which the bundled tokenizer's own does not know.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[InProcess]:
    # The agent's own prompt has some 4,000 of the bundled tokenizer's tokens.
    running = InProcess(random_pair(TEMPLATE, 16384))
    yield running
    running.close()


def agent(server: InProcess, added: list[tuple[int, bool]], stream: bool, **options: Any) -> Any:
    """An agent with one tool of its own, which notes what it is called with."""

    @smolagents.tool
    def add(digit: int, dry: bool) -> int:
        """Adds one.

        Args:
            digit: A number.
            dry: Whether it stays as it is.
        """
        added.append((digit, dry))
        return digit + 1

    add.inputs["digit"]["enum"] = [1, 2, 3]
    model = smolagents.OpenAIModel("text", api_base=server.url, api_key="none", **options)
    return smolagents.ToolCallingAgent(
        tools=[add], model=model, max_steps=2, stream_outputs=stream, verbosity_level=0
    )


def said(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


class Turns(Script):
    """An engine that says one text after the other, a request each, and keeps the prompts."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        super().__init__(tokenizer)
        self.texts = list(texts)
        self.prompts: list[str] = []

    def submit(self, job: Any) -> None:
        self.say(self.texts.pop(0))
        self.prompts.append(self.tokenizer.decode(job.inputs["input_ids"][0]))
        super().submit(job)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "in_pieces"])
def test_an_agent_calls_a_tool_and_answers(server: InProcess, stream: bool) -> None:
    script = Turns(
        server.pair.tokenizer,
        f"I add.\n{said('add', digit=3, dry=True)}\n{said('add', digit=4, dry=False)}",
        said("final_answer", answer="four"),
    )
    server.pair.engine = script
    added: list[tuple[int, bool]] = []
    asked = agent(server, added, stream)  # smolagents asks for some call: tool_choice "required"
    result = asked.run("Add one to three.", return_full_result=True)
    assert result.output == "four"
    assert sorted(added) == [(3, True), (4, False)]
    assert "'name': 'add', 'arguments':" in script.prompts[1], "it is told what it has called"
    observed = script.prompts[1].rpartition("Observation:\n")[2].partition("<|im_end|>")[0]
    assert sorted(observed.split()) == ["4", "5"]
    assert result.token_usage.input_tokens > 1000
    assert result.token_usage.output_tokens > 20


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "in_pieces"])
def test_calls_of_a_named_tool_are_forced(server: InProcess, stream: bool) -> None:
    server.pair.engine = server.real
    added: list[tuple[int, bool]] = []
    choice = {"type": "function", "function": {"name": "add"}}
    asked = agent(server, added, stream, tool_choice=choice, temperature=1.0, seed=5)
    # The answer behind the last step has no tools, and so no choice among them.
    asked.provide_final_answer = lambda task: smolagents.ChatMessage(
        role="assistant", content="enough"
    )
    assert asked.run("Add one to three.") == "enough"
    assert len(added) == 2
    assert all(digit in (1, 2, 3) and dry in (True, False) for digit, dry in added)
