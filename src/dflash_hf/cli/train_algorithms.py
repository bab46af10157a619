"""The recipes of `--algorithm`: which options each one sets, and which options contradict it."""

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
    """What a recipe sets.

    Args:
        options (mapping): Fields of [`TrainSettings`].
        draft_options (mapping): Fields of a fresh draft's config.
        sizes (mapping): Fields of the config that its drafts have, in these sizes or others.
        absent (tuple of `str`): Fields of the config that its drafts do not have.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    draft_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    absent: tuple[str, ...] = ()


# z-lab/Qwen3.8-27B-DFlash2's sizes. Its loss is not published: every --loss is a refinement.
DFLASH2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
# DeepSpec's, of all its drafts and of RedHatAI's.
DSPARK = {"markov_rank": 256}
ALGORITHMS: dict[str, Algorithm] = {
    "dflash": Algorithm(options={"loss": "dpace"}, absent=(*DFLASH2, *DSPARK)),
    "dflash2": Algorithm(sizes=DFLASH2, absent=tuple(DSPARK)),
    "dspark": Algorithm(
        sizes=DSPARK, draft_options={"sample_from_anchor": True}, absent=tuple(DFLASH2)
    ),
    # Each slot sees the earlier ones of its block, and learns the target's distribution: for trees
    "jetspec": Algorithm(
        options={"loss": "kl"}, draft_options={"is_causal": True}, absent=(*DFLASH2, *DSPARK)
    ),
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
    # The default contradicts nothing, and what it sets are defaults. A recipe is of fresh drafts:
    # `TrainSettings.check_idle` refuses it beside another draft
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
    """Returns settings without what their `algorithm` sets: a file of them names the algorithm alone.

    So another `--algorithm` does not keep the options of the one before.
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
