"""This module defines the recipes of `--algorithm`: the options that a recipe sets, and those that contradict it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_hf.cli.train_settings import TrainSettings, flag
from dflash_hf.errors import require

ALGORITHM = "algorithm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A recipe: the options that it sets, and the options that contradict it.

    Args:
        options (mapping): Fields of [`TrainSettings`] and their values.
        draft_options (mapping): Fields of a fresh draft's config and their values.
        sizes (mapping): Fields of the config that the recipe's drafts need. The values are defaults.
        absent (tuple of `str`): Fields of the config that the recipe's drafts do not have.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    draft_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    absent: tuple[str, ...] = ()


# The sizes are those of z-lab/Qwen3.8-27B-DFlash2. Its loss is not published, so every --loss is allowed.
DFLASH2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
# The value of all drafts of DeepSpec and of RedHatAI.
DSPARK = {"markov_rank": 256}
ALGORITHMS: dict[str, Algorithm] = {
    "dflash": Algorithm(options={"loss": "dpace"}, absent=(*DFLASH2, *DSPARK)),
    "dflash2": Algorithm(sizes=DFLASH2, absent=tuple(DSPARK)),
    "dspark": Algorithm(
        sizes=DSPARK, draft_options={"sample_from_anchor": True}, absent=tuple(DFLASH2)
    ),
    # For trees: each slot sees only the earlier slots of its block, and learns the target's distribution.
    "jetspec": Algorithm(
        options={"loss": "kl"}, draft_options={"is_causal": True}, absent=(*DFLASH2, *DSPARK)
    ),
}


def with_algorithm(settings: TrainSettings, given: Collection[str]) -> TrainSettings:
    """Returns settings with the options that their `algorithm` sets.

    Args:
        given (collection of `str`): The names of the options that were given by a flag or a YAML file.

    Raises:
        ValueError: If there is no such algorithm, or a given option contradicts it.
    """
    name = settings.algorithm
    known = f"--algorithm among {', '.join(ALGORITHMS)}"
    require(name in ALGORITHMS, known, name, "choose one of them")
    # The default algorithm contradicts nothing, and it sets only defaults. Recipes are for fresh drafts:
    # `TrainSettings.check_idle` refuses a recipe together with --draft.
    if ALGORITHM not in given or settings.draft is not None:
        return settings
    algorithm = ALGORITHMS[name]
    action = "leave one of them out"
    for option, value in algorithm.options.items():
        got = getattr(settings, option)
        is_fine = option not in given or got == value
        require(is_fine, f"{flag(option)} {value} with {flag(ALGORITHM)} {name}", got, action)
    fields = dict(settings.draft_options)
    for option in algorithm.absent:
        got = fields.get(option)
        what = f"no {option} in --draft-options with {flag(ALGORITHM)} {name}"
        require(got is None, what, got, action)
    for option, value in algorithm.draft_options.items():
        got = fields.get(option, value)
        what = f"{option} {json.dumps(value)} in --draft-options with {flag(ALGORITHM)} {name}"
        require(got == value, what, got, action)
        fields[option] = value
    for option, size in algorithm.sizes.items():
        got = fields.setdefault(option, size)
        what = f"a size as {option} in --draft-options with {flag(ALGORITHM)} {name}"
        require(got is not None, what, got, action)
    return replace(settings, draft_options=fields, **algorithm.options)


def without_algorithm(settings: TrainSettings) -> TrainSettings:
    """Returns settings without the options that their `algorithm` sets, so that a file of settings names only it.

    If a later command names another `--algorithm`, the options of the earlier algorithm are then not kept.
    """
    algorithm = ALGORITHMS[settings.algorithm]
    defaults = TrainSettings(target=settings.target, output_dir=settings.output_dir)
    unset: dict[str, Any] = {}
    for option, value in algorithm.options.items():
        if getattr(settings, option) == value:
            unset[option] = getattr(defaults, option)
    set_by_it = {**algorithm.draft_options, **algorithm.sizes}
    fields = {
        option: value
        for option, value in settings.draft_options.items()
        if option not in set_by_it or value != set_by_it[option]
    }
    return replace(settings, draft_options=fields, **unset)
