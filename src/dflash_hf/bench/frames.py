"""This module makes pandas data frames of acceptance: of a run by task and position, and of drafts token by token."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from dflash_hf.bench.answers import Turn
from dflash_hf.bench.counting import by_position, draft_counts, ratio
from dflash_hf.bench.run_files import read_run
from dflash_hf.data.prompt_files import Prompt, check_prompts
from dflash_hf.errors import is_a, require
from dflash_hf.generation.checks import check_is_draft
from dflash_hf.generation.generate import unwrapped
from dflash_hf.generation.iterate import DFlashStep, iterate
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import Processor, encode_prompt, tokenizer_of
from dflash_hf.plot_style import module_of_research

logger = logging.getLogger(__name__)

ACCEPTANCE_COLUMNS = [
    "method",
    "dataset",
    "category",
    "position",
    "num_tried",
    "num_accepted",
    "conditional",
    "joint",
]
TOKEN_COLUMNS = [
    "draft",
    "task",
    "prompt",
    "index",
    "verify",
    "position",
    "token_id",
    "token",
    "guess_id",
    "is_right",
    "target_probability",
]


def acceptance_frame(folder: str | os.PathLike[str]) -> Any:
    """Returns how much a `dflash-hf bench` run accepted, by task and position, as a `pandas.DataFrame`.

    There is one line per drafting method, set, category and position in the block. A verify without a proposal does
    not count. Columns:

    | column | meaning |
    |---|---|
    | `method` | `model_id` of the run, such as `dflash` |
    | `dataset`, `category` | set and category of the questions |
    | `position` | place in the block, 1 for the first guess |
    | `num_tried` | verifies that accepted everything before this place and checked it |
    | `num_accepted` | how many of these verifies accepted this place |
    | `conditional` | `num_accepted / num_tried` |
    | `joint` | `num_accepted` divided by all verifies of these questions |

    Args:
        folder: The folder of the run, with `run.json` and `answers-*.jsonl`.

    Raises:
        ValueError: If the folder contains no run.
        ImportError: Without pandas; `pip install 'dflash-hf[research]'`.
    """
    run = read_run(folder)
    lines: list[tuple[Any, ...]] = []
    for cell in run.cells:
        turns: dict[tuple[str, str], list[Turn]] = defaultdict(list)
        for answer in run.answers[cell.model_id].values():
            turns[answer.dataset, answer.category].extend(answer.turns)
        for (dataset, category), some in turns.items():
            counts = draft_counts(some)
            for position, (num_accepted, num_tried) in enumerate(by_position(counts), 1):
                # If no draft was right up to here, this place was never checked.
                conditional = ratio(num_accepted, num_tried)
                joint = num_accepted / len(counts)
                place = (cell.model_id, dataset, category, position)
                lines.append((*place, num_tried, num_accepted, conditional, joint))
    return module_of_research("pandas").DataFrame(lines, columns=ACCEPTANCE_COLUMNS)


def token_frame(
    target: PreTrainedModel,
    drafts: Mapping[str, DFlashDraftModel],
    encoder: Processor,
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    max_new_tokens: int = 256,
    **template_options: Any,
) -> Any:
    """Decodes prompts greedily with each draft. Returns a line per draft and token, as a `pandas.DataFrame`.

    Each verify checks the draft's block as a chain. The first token of an answer comes from the prefill, which has no
    guesses, so this token has no line. In half precision, two tokens may tie within rounding, and then the texts of
    two drafts differ from there on. The lines after the last token that all drafts share are left out, and the log
    says so. Columns:

    | column | meaning |
    |---|---|
    | `draft`, `task` | the names in the arguments |
    | `prompt` | number of the prompt in its task, from 0 |
    | `index` | number of the token in the answer; 0 is the prefill's token |
    | `verify` | number of the verify that committed it, from 1 |
    | `position` | its place in the block, 1 for the first guess |
    | `token_id`, `token` | the token of the target, as its number and as text |
    | `guess_id` | the draft's guess; missing if all guesses of the block were right before it |
    | `is_right` | whether the guess is the token; missing without a guess |
    | `target_probability` | the probability of the token by the target's own logits, without processors |

    `frame.groupby(["draft", "task", "position"])["is_right"].mean()` is the acceptance at each position, given that
    everything before it was accepted. Tokens divided by lines of position 1 are the acceptance length.

    Args:
        target (`PreTrainedModel`): The target.
        drafts (mapping): Drafts of this target by name.
        encoder: The target's tokenizer, or its processor.
        prompts (mapping): A list of prompts by the name of the task. Each prompt is a text, or messages in
            Transformers' form.
        max_new_tokens (`int`): Maximum length of an answer, in tokens.
        template_options: Options of the chat template, such as `enable_thinking=False`.

    Raises:
        ValueError: If there is no draft or no task; if a task has one prompt instead of a list; if a draft is not a
            draft or is set to check a tree; or if `generate` refuses the call.
        ImportError: Without pandas; `pip install 'dflash-hf[research]'`.
    """
    # Something that is not a mapping (for example, a draft itself) may have no length.
    has_drafts = is_a(drafts, Mapping) and bool(drafts)
    require(has_drafts, "at least one draft by name", type(drafts).__name__, "pass {'name': draft}")
    has_prompts = is_a(prompts, Mapping) and bool(prompts)
    require(has_prompts, "at least one task with prompts", prompts, "pass {'task': [prompt, ...]}")
    for its_prompts in prompts.values():
        check_prompts(its_prompts)
    drafts = {name: unwrapped(draft) for name, draft in drafts.items()}
    for name, draft in drafts.items():
        check_is_draft(draft)
        nodes = draft.generation_config.num_tree_nodes
        action = "set draft.generation_config.num_tree_nodes to None"
        require(not nodes, f"the draft {name!r} without a tree", f"num_tree_nodes={nodes}", action)
    pandas = module_of_research("pandas")
    lines: list[tuple[Any, ...]] = []
    for task, its_prompts in prompts.items():
        for number, prompt in enumerate(its_prompts):
            inputs: dict[str, Any] = {
                **encode_prompt(encoder, prompt, target.device, **template_options)
            }
            told: dict[str, list[tuple[Any, ...]]] = {}
            for name, draft in drafts.items():
                steps = iterate(
                    target,
                    draft,
                    **inputs,
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    output_logits=True,
                )
                told[name] = _told_by(steps)
            lines += _shared_lines(told, task, number)
    decode = tokenizer_of(encoder).decode
    without_text = [column for column in TOKEN_COLUMNS if column != "token"]
    frame = pandas.DataFrame(lines, columns=without_text)
    frame["token"] = [decode([token]) for token in frame["token_id"]]
    # pandas' own types for values that may be missing. Means leave out these lines.
    frame["guess_id"] = frame["guess_id"].astype("Int64")
    frame["is_right"] = frame["is_right"].astype("boolean")
    return frame[TOKEN_COLUMNS]


def _told_by(steps: Iterator[DFlashStep]) -> list[tuple[Any, ...]]:
    """Returns verify, position, token, guess, whether the guess is right, and the target's probability, per token."""
    lines: list[tuple[Any, ...]] = []
    for step in steps:
        # The prefill has no guesses and gives out no logits.
        if step.logits is None:
            continue
        tokens = step.committed[0]
        probabilities = step.logits[0, : len(tokens)].float().softmax(dim=-1)
        chosen = probabilities.gather(1, tokens[:, None])[:, 0].tolist()
        guesses = step.proposals[0].tolist()
        for place, (token, probability) in enumerate(zip(tokens.tolist(), chosen, strict=True)):
            guess = None
            is_right = None
            if place < len(guesses):
                guess = guesses[place]
                is_right = guess == token
            lines.append((step.index, place + 1, token, guess, is_right, probability))
    return lines


def _shared_lines(
    told: dict[str, list[tuple[Any, ...]]], task: str, number: int
) -> list[tuple[Any, ...]]:
    """Returns the lines of one prompt for all drafts, up to the token where the drafts' texts differ."""
    num_shared = _num_shared([[line[2] for line in its] for its in told.values()])
    if num_shared < max(map(len, told.values())):
        logger.warning(
            "The drafts' texts to prompt %d of %s differ behind %d tokens, at a tie within rounding; the tokens "
            "behind are left out.",
            number,
            task,
            num_shared + 1,
        )
    lines: list[tuple[Any, ...]] = []
    for name, its in told.items():
        for index, line in enumerate(its[:num_shared], start=1):
            lines.append((name, task, number, index, *line))
    return lines


def _num_shared(texts: list[list[int]]) -> int:
    """Returns how many tokens, from the first one on, are the same in all texts."""
    num_shared = 0
    for tokens in zip(*texts, strict=False):
        if len(set(tokens)) > 1:
            return num_shared
        num_shared += 1
    return num_shared
