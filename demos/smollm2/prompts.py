"""Write prompts of code and of chat for the draft's training: `make real-draft` runs this.

Code prompts are signatures and docstrings of Python's own standard library. Chat prompts are tasks about topics, both
listed below. Neither is part of a test set. The target answers them, so a prompt needs no answer here.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

CODE_TASKS = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```",
    "Complete this Python function:\n```python\n{code}\n```",
    "Write the body of this function and explain what it does.\n\n{code}",
    "Write a Python function that does the following: {summary}",
    "How do I do this in Python? {summary}",
)
CHAT_TASKS = (
    "Write a blog post about {topic}.",
    "Write a short story in which {topic} plays a part.",
    "Write a poem about {topic}.",
    "Write a formal email to a colleague about {topic}.",
    "Write a persuasive letter to a local newspaper about {topic}.",
    "Draft an announcement of a public lecture on {topic}.",
    "Write the opening paragraph of a novel that begins with {topic}.",
    "Describe a vivid scene that has to do with {topic}. Use no more than two paragraphs.",
    "Explain {topic} to a ten-year-old child.",
    "Explain {topic} to an engineer.",
    "What is {topic}?",
    "What are the main causes of {topic}, and what follows from it?",
    "What are the advantages and disadvantages of {topic}?",
    "List five facts about {topic}.",
    "Give me three book ideas about {topic}, each with a title and one sentence.",
    "Compare {topic} with {other}.",
    "How are {topic} and {other} related?",
    "Which matters more for a good life, {topic} or {other}? Give reasons.",
    "Pretend to be a teacher of {topic}. Answer a student who asks why it matters.",
    "You are a journalist. Interview an expert on {topic}: write the questions and the answers.",
    "Act as a travel guide who knows a lot about {topic}. What do you tell your guests?",
    "Imagine that you are a famous scientist. What do you say about {topic}?",
    "Summarize what is known about {topic} in three sentences.",
    "Make a table with the most important terms of {topic} and what each means.",
    "Give the main ideas of {topic} as JSON with the keys name, idea and example.",
    "Write a plan of one week for somebody who wants to learn about {topic}.",
    "Is the following claim true? {topic} will be of no importance in fifty years. Argue for and against it.",
    "Correct the grammar of this text: he dont knows nothing about {topic} and he want learn it since two year.",
    "Write a dialogue between two friends who disagree about {topic}.",
    "Which three questions should a beginner ask about {topic}, and what are the answers?",
    "A small company works on {topic}. It earns 200 dollars on Monday and twice as much on each day that follows. "
    "How much has it earned by Thursday?",
    "There are {number} people in a course on {topic}. A third of them leave, and then 4 others come. "
    "How many are there now? Think step by step.",
    "How does {topic} affect the economy of a country?",
    "What did people in the past think about {topic}?",
    "Write a Python program that helps somebody with {topic}.",
    "Write a web page in HTML about {topic}, with a heading and a list.",
    "Suggest a good title and a summary for an essay on {topic} and {other}.",
    "What should I keep in mind when I talk with a customer about {topic}?",
)
TOPICS = """
photosynthesis; the water cycle; black holes; plate tectonics; vaccines; gravity; electric cars; solar energy
coral reefs; climate change; recycling; volcanoes; the human heart; sleep; nutrition; running; yoga
mental health; stress at work; remote work; job interviews; teamwork; leadership; time management
project planning; marketing; inflation; taxes; saving money; the stock market; insurance; supply and demand
international trade; small businesses; online shopping; artificial intelligence; computer networks; databases
sorting algorithms; recursion; encryption; operating systems; web browsers; open source software; robots
smartphones; social media; video games; virtual reality; space travel; the moon landing; the Roman Empire
the Industrial Revolution; the French Revolution; ancient Egypt; the Silk Road; the printing press; democracy
human rights; education; libraries; museums; folk music; jazz; classical music; opera; painting; photography
film; theatre; architecture; fashion; cooking; baking bread; coffee; tea; wine; street food; gardening
beekeeping; dogs; cats; birds; whales; bees; forests; rivers; deserts; mountains; oceans; islands; winter
autumn; storms; earthquakes; astronomy; telescopes; chemistry; the periodic table; acids and bases; magnetism
light; sound; probability; geometry; algebra; calculus; statistics; prime numbers; logic; philosophy; ethics
happiness; friendship; family traditions; childhood; ageing; language learning; translation; poetry
science fiction; mystery novels; fairy tales; chess; football; basketball; tennis; cycling; swimming; hiking
camping; travel in Japan; a trip to Italy; trains; bridges; airports; city traffic; public transport; housing
urban parks; farming; fishing; forestry; clean water; hospitals; pharmacies; first aid; allergies
the immune system; DNA; evolution; dinosaurs; microscopes; batteries; wind turbines; nuclear power; oil
plastics; steel; glass; 3D printing; copyright; journalism; advertising; elections
"""


def topics() -> list[str]:
    """Returns the topics of chat prompts."""
    lines = TOPICS.strip().splitlines()
    return [topic.strip() for line in lines for topic in line.split(";")]


def functions() -> Iterator[tuple[str, str]]:
    """Yields signature with docstring, and the docstring's first line, of the standard library's functions."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            documentation = ast.get_docstring(node)
            if documentation is None or len(documentation) > 600:
                continue
            indented = documentation.replace("\n", "\n    ")
            code = f'def {node.name}({ast.unparse(node.args)}):\n    """{indented}\n    """'
            yield code, documentation.splitlines()[0]


def code_prompts() -> list[str]:
    """Returns all code prompts."""
    return [
        task.format(code=code, summary=summary)
        for (code, summary), task in itertools.product(functions(), CODE_TASKS)
    ]


def chat_prompts(draw: random.Random) -> list[str]:
    """Returns all chat prompts; what a task needs beside its topic is drawn."""
    names = topics()
    return [
        task.format(topic=topic, other=draw.choice(names), number=3 * draw.randint(3, 30))
        for topic, task in itertools.product(names, CHAT_TASKS)
    ]


def write(path: Path, prompts: list[str]) -> None:
    """Writes a row for each prompt."""
    rows = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def main() -> None:
    """Writes code.jsonl and chat.jsonl into a folder."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="Folder to write.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the draws.")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("code", code_prompts()), ("chat", chat_prompts(draw))):
        draw.shuffle(prompts)
        write(arguments.out / f"{name}.jsonl", prompts)
        print(f"{len(prompts)} prompts in {arguments.out / name}.jsonl")


if __name__ == "__main__":
    main()
