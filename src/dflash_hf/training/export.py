"""This module exports a trained draft: a folder in the format of a serving program, with a model card."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dflash_hf.checkpoints.drafts import replaced, save_draft
from dflash_hf.checkpoints.names import FormatName
from dflash_hf.errors import one_line
from dflash_hf.modeling_dflash import DFlashDraftModel

CARD = "README.md"
UNPLACED = "PATH/TO/THIS/FOLDER"  # the path in a card's snippets if the draft's place is not known
TAGS = ["dflash", "speculative-decoding", "block-diffusion", "draft-model"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SERVED_BY: dict[str, str] = {
    "dflash": """\
```python
import dflash_hf
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{target}")
draft = dflash_hf.DFlashDraftModel.from_pretrained("{draft}", dtype="auto", device_map={{"": target.device}})
messages = [{{"role": "user", "content": "How many primes are there below 30?"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = target.generate(**inputs.to(target.device), assistant_model=draft, max_new_tokens=256)
```""",
    "sglang": """\
```bash
python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path {draft}
```""",
    "vllm": """\
```bash
vllm serve {target} --speculative-config \\
    '{{"method": "dflash", "model": "{draft}", "num_speculative_tokens": {proposals}}}'
```""",
}
# The programs that can serve a folder in each format, in the order of the card. `dflash_hf` reads all formats.
READERS: dict[FormatName, tuple[str, ...]] = {
    "dflash": ("dflash",),
    "zlab": ("dflash", "vllm", "sglang"),
    "speculators": ("dflash", "vllm"),
    "muse": ("dflash", "vllm", "sglang"),
    "deepspec-gemma4": ("dflash",),
    "laguna": ("dflash", "vllm"),
    "deepspec": ("dflash",),
}
NAMES = {"dflash": "Transformers with dflash-hf", "sglang": "SGLang", "vllm": "vLLM"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """The facts of a card that are not in the draft itself."""

    target: str
    license: str | None = None
    datasets: Sequence[str] = ()  # the sources of the prompts
    # set -> the draft's entries in the summary of a bench: `questions`, `acceptance`, `speedup`, `own_speedup`.
    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    conditions: str = ""  # the conditions of the measurement: machine, dtype, batch
    # Facts about the training, one per line of the card: name -> value.
    training: Mapping[str, object] = field(default_factory=dict[str, object])
    # Versions of the packages with which the draft was trained.
    versions: Mapping[str, str | None] = field(default_factory=dict[str, str | None])


def export(
    draft: DFlashDraftModel,
    folder: str | PathLike[str],
    facts: CardFacts,
    format: FormatName,
    target: PreTrainedModel | None = None,
) -> str | None:
    """Writes a draft in a format of [`save_draft`], with a model card, completely or not at all.

    Args:
        draft (`DFlashDraftModel`): The draft. It is not changed, and it is written in its own dtype.
        folder (`str` or `os.PathLike`): The parent of the folder to write, which has the name of the format.
        facts ([`CardFacts`]): Further facts for the card.
        format (`str`): The format.
        target (`PreTrainedModel`, *optional*): See [`save_draft`]. It may be on the meta device if the draft needs no
            copies of its embedding and head.

    Returns:
        `str`, *optional*: The reason why the format cannot express the draft, which is logged too, or `None` if the
        draft was written.
    """
    text = card(draft, facts, format)
    try:
        with replaced(Path(folder) / format) as made:
            save_draft(draft, made, format, target)
            (made / CARD).write_text(text, encoding="utf-8")
    except ValueError as error:
        logger.warning("no export in the format %s: %s", format, one_line(error))
        return one_line(error)
    return None


def card(
    draft: DFlashDraftModel,
    facts: CardFacts,
    format: FormatName = "dflash",
    place: str | None = None,
) -> str:
    """Returns the model card of a draft: Markdown that begins with the Hub's fields.

    Args:
        place (`str`, *optional*): The path or id of the draft in the snippets. The default is `"PATH/TO/THIS/FOLDER"`.
    """
    import yaml

    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": TAGS,
    }
    front |= {} if facts.license is None else {"license": facts.license}
    # The Hub's fields get only ids of the Hub. The name of a folder would become a broken link.
    front |= {"base_model": facts.target} if is_hub_id(facts.target) else {}
    hub_sets = [name for name in facts.datasets if is_hub_id(name)]
    front |= {"datasets": hub_sets} if hub_sets else {}
    config = draft.config
    body = [
        f"# DFlash draft for {Path(facts.target).name}",
        "",
        "It drafts a block of tokens at once for its target, which verifies them: the text is the target's own. Alone "
        "it generates nothing.",
        "",
        *_table(
            {
                "target": facts.target,
                "parameters": f"{draft.num_parameters():,}",
                "layers": config.num_hidden_layers,
                "block": f"{config.block_size} slots, {config.num_proposals(config.block_size)} tokens proposed",
                "tapped layers of the target": ", ".join(map(str, config.target_layer_ids)),
                "mask token": config.mask_token_id,
                "dtype": str(draft.dtype).removeprefix("torch."),
                "format": format,
            }
        ),
        "",
        "## Use",
    ]
    values = {"target": facts.target, "draft": place or UNPLACED}
    proposals = config.num_proposals(config.block_size)
    readers = READERS[format]
    if format == "muse" and config.sliding_window is not None:
        # vLLM and SGLang count the draft's windows differently, and SGLang's sliding layers are causal.
        readers = readers[:1]
    for reader in readers:
        body += [
            "",
            f"{NAMES[reader]}:",
            "",
            SERVED_BY[reader].format(**values, proposals=proposals),
        ]
    body += ["", "## Acceptance", "", *_acceptance(facts)]
    if facts.training or facts.versions or facts.datasets:  # else others may have trained it
        body += [
            "",
            "## Training",
            "",
            *_table({"prompts": ", ".join(facts.datasets) or "the target's own"}),
        ]
        body += [f"| {name} | {one_line(value)} |" for name, value in facts.training.items()]
        versions = ", ".join(
            f"{name} {version}" for name, version in facts.versions.items() if version
        )
        body += [
            "",
            f"Trained by dflash-hf with {versions}." if versions else "Trained by dflash-hf.",
        ]
    text = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{text}---\n\n" + "\n".join(body) + "\n"


def is_hub_id(name: str) -> bool:
    """Returns True if a name has the form of an id on the Hub and is not a local path."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _acceptance(facts: CardFacts) -> list[str]:
    measured = {name: block for name, block in facts.measured.items() if block["acceptance"]}
    if not measured:
        return ["Not measured. `dflash-hf bench` does it."]
    rows = [
        "Mean number of tokens that a verify commits, the target's own token included; tokens per second over those "
        "of Transformers' plain `generate`, and over those of dflash-hf without the draft, which is what the draft "
        f"itself brings. {facts.conditions}".strip(),
        "",
        "| set | questions | acceptance length | over plain `generate` | over dflash-hf without the draft |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, block in measured.items():
        cells = [
            Path(name).name,
            str(block["questions"]),
            f"{block['acceptance']['acceptance_length']:.2f}",
            _ratio(block.get("speedup")),
            _ratio(block.get("own_speedup")),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _ratio(speedup: Mapping[str, Any] | None) -> str:
    """Formats a speed-up for the card. The text is empty if the speed-up was not measured."""
    if speedup is None or speedup["ratio"] is None:
        return ""
    return f"{speedup['ratio']:.2f}x"


def _table(values: Mapping[str, object]) -> list[str]:
    return [
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {one_line(value)} |" for name, value in values.items()),
    ]
