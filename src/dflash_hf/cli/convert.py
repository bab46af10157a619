"""This module is `dflash-hf convert`, which saves a draft in another format without changing its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from dflash_hf.checkpoints.names import FormatName
from dflash_hf.pair.loading import check_place, config_of_target, load_weights, takes_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dflash_hf.modeling_dflash import DFlashDraftModel


def convert(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of the draft, in any format.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[
        FormatName,
        typer.Option(
            "--to",
            help="Format to write. vLLM and SGLang read zlab and muse. vLLM also reads speculators and laguna.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of the target. Some formats need its vocabulary, layers, embedding or name."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty.")
    ] = False,
) -> None:
    """Save a draft in another format, so that vLLM, SGLang or Transformers can serve it. The weights do not change."""
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"expected a folder to write, got the file {destination}; choose another")
    if destination.is_dir() and any(destination.iterdir()) and not force:
        found = f"{destination} with files in it"
        raise ValueError(
            f"expected a new or empty folder, got {found}; pass --force to write there"
        )
    if destination.resolve() == Path(source).resolve():
        raise ValueError(
            f"expected a folder other than the folder of the draft, got {destination}; choose another one"
        )
    check_place("SRC", source)
    if target is not None:
        check_place("--target", target)
    from transformers.utils import logging

    from dflash_hf.checkpoints.drafts import inspect_draft, load_draft, replaced, save_draft
    from dflash_hf.checkpoints.files import widest_dtype

    logging.disable_progress_bar()
    with Console(stderr=True).status(f"converting {escape(source)}"):
        draft = load_draft(source, dtype=widest_dtype(inspect_draft(source)["dtypes"]))
        model = None if target is None else load_target_for(target, draft, to)
        # The draft is first written completely, so that a draft that the format cannot express replaces nothing.
        with replaced(destination) as folder:
            save_draft(draft, folder, to, model)
    typer.echo(f"{destination}: format {to}, {draft.num_parameters():,} parameters")


def load_target_for(target: str, draft: DFlashDraftModel, to: FormatName) -> PreTrainedModel:
    """Returns the target. Its weights are not loaded if its config says everything that the format needs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from dflash_hf.checkpoints.formats import FORMATS

    config = config_of_target(target)
    model_class = AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM
    has_vocabulary = FORMATS[to].has_vocabulary
    # A draft may have only one of the two. The other one is then the target's.
    has_own = {draft.config.own_embed_tokens, draft.config.own_lm_head}
    if has_vocabulary is None or has_own == {has_vocabulary}:
        with torch.device("meta"):
            return model_class.from_config(config)
    return load_weights(model_class, target, dtype="auto")
