"""This module is `dflash-hf inspect`, which describes a draft from its config and the headers of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dflash_hf.cli.drafts import PublishedDraft, published_drafts, words_for
from dflash_hf.cli.options import JsonOption
from dflash_hf.pair.loading import check_place


def inspect(
    draft: Annotated[str, typer.Argument(help="Folder or Hub id of the draft, in any format.")],
    as_json: JsonOption = False,
) -> None:
    """Describe a draft and name its target. No weights are loaded."""
    check_place("DRAFT", draft)
    from dflash_hf.checkpoints.drafts import inspect_draft

    found = inspect_draft(draft)
    published = published_as(draft)
    if as_json:
        checked = None
        if published is not None:
            checked = published.checked
        typer.echo(json.dumps({**found, "checked": checked}))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in described(found).items():
        table.add_row(name, value)
    if published is not None:
        checked = words_for(published.checked) or "nothing checked here"
        table.add_row("published", f"for {published.target}; {checked}")
    Console().print(table, highlight=False, markup=False)


def published_as(place: str) -> PublishedDraft | None:
    """Returns the published draft whose Hub id is `place`, or the end of the path `place`; `None` if there is none."""
    end = "/".join(Path(place).parts[-2:])
    for one in published_drafts():
        if one.draft == end:
            return one
    return None


def described(found: dict[str, Any]) -> dict[str, str]:
    """Returns the lines of the table for the result of [`~dflash_hf.checkpoints.drafts.inspect_draft`]."""
    form = found["format"]
    if found["is_dflash2"]:
        form += " (DFlash 2)"
    if found["markov_rank"]:
        form += f" (DSpark, Markov head of rank {found['markov_rank']})"
    wanted: list[str] = []
    if found["target"]:
        wanted.append(found["target"])
    if found["num_target_layers"]:
        wanted.append(f"{found['num_target_layers']} layers")
    wanted.append(f"hidden size {found['target_hidden_size']}")
    layers = f"{found['num_hidden_layers']} of hidden size {found['hidden_size']}"
    if found["sliding_window"]:
        layers += f", some of them with a window of {found['sliding_window']}"
    vocabulary = "not stated"
    if found["vocab_size"]:
        vocabulary = f"{found['vocab_size']:,} tokens"
    if found["draft_vocab_size"]:
        vocabulary += f"; the draft proposes {found['draft_vocab_size']:,} tokens"
    own: list[str] = []
    if found["own_embed_tokens"]:
        own.append("embedding")
    if found["own_lm_head"]:
        own.append("head")
    dtype = ", ".join(found["dtypes"])
    if found["quantised_bits"]:
        dtype += f", quantised to {found['quantised_bits']} bits in the files"
    return {
        "format": form,
        "target": ", ".join(wanted),
        "taps": f"after layers {', '.join(map(str, found['target_layer_ids']))} (from 0)",
        "block": f"{found['block_size']} slots, {found['num_proposals']} tokens proposed",
        "mask token": str(found["mask_token_id"]),
        "layers": layers,
        "vocabulary": vocabulary,
        "its own": " and ".join(own) or "nothing; the embedding and the head are the target's",
        "dtype": dtype,
        "size": f"{found['num_parameters']:,} parameters, {found['num_bytes'] / 2**20:,.1f} MB",
    }
