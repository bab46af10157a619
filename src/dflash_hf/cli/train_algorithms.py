"""What `--algorithm` stands for: options of a published recipe, by names of ours."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_hf.cli.train_settings import TrainSettings, flag
from dflash_hf.errors import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What a recipe sets.

    Args:
        options (mapping): Fields of [`TrainSettings`].
        draft_options (mapping): Fields of a fresh draft's config.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    draft_options: Mapping[str, Any] = field(default_factory=dict[str, Any])


ALGORITHMS: dict[str, Algorithm] = {
    "dflash": Algorithm(),
    # A convolution around each sublayer, and a selector of paths, with the sizes of z-lab/Qwen3.8-27B-DFlash2.
    "dflash2": Algorithm(
        draft_options={
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        }
    ),
    # Slots that see the earlier ones of their block, under the target's distribution: for trees.
    "jetspec": Algorithm(options={"loss": "kl"}, draft_options={"is_causal": True}),
}


def with_algorithm(settings: TrainSettings, given: Collection[str]) -> TrainSettings:
    """Returns settings with what their `algorithm` sets.

    Args:
        given (collection of `str`): Names of the options that were given, by a flag or a YAML.

    Raises:
        ValueError: If there is no such algorithm, or an option that was given contradicts it.
    """
    name = settings.algorithm
    known = f"--algorithm among {', '.join(ALGORITHMS)}"
    require(name in ALGORITHMS, known, name, "choose one of them")
    # What it sets is of fresh drafts: `TrainSettings.check_idle` refuses it beside another one
    if settings.draft is not None:
        return settings
    algorithm = ALGORITHMS[name]
    action = "leave one of them out"
    for option, value in algorithm.options.items():
        got = getattr(settings, option)
        is_fine = option not in given or got == value
        require(is_fine, f"{flag(option)} {value} with --algorithm {name}", got, action)
    fields = dict(settings.draft_options)
    for option, value in algorithm.draft_options.items():
        what = f"{option} {json.dumps(value)} in --draft-options with --algorithm {name}"
        require(fields.get(option, value) == value, what, fields.get(option), action)
        fields[option] = value
    return replace(settings, draft_options=fields, **algorithm.options)
