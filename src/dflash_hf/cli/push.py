"""This module is `dflash-hf push`, which publishes a draft on the Hub or in a folder, with a card and code."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from dflash_hf.checkpoints.names import FormatName
from dflash_hf.pair.loading import check_place

# Files whose names may differ from draft to draft, or that a draft may lack. Files of an earlier draft would
# be loaded in place of the new ones.
OF_A_DRAFT = [
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "generation_config.json",
]
CUSTOM_GENERATE = '''\
"""Decoding with this repository's draft: `generate(..., custom_generate=DRAFT, trust_remote_code=True)`."""

from functools import lru_cache

from dflash_hf import load_draft

DRAFT = {place!r}


@lru_cache(maxsize=1)
def load(device, dtype):
    return load_draft(DRAFT, dtype=dtype, device_map={{"": device}})


def generate(model, **kwargs):
    """Answers as `model.generate` does, in fewer forwards of the model; takes what that takes."""
    return model.generate(**{{**kwargs, "assistant_model": load(model.device, model.dtype)}})
'''
ON_CARD = """
## In one line

With `dflash-hf` installed. The code that this runs is `custom_generate/generate.py` of this repository: it loads the
draft and calls `generate` with it.

```python
output = target.generate(**inputs, custom_generate={place!r}, trust_remote_code=True)
```
"""


def push(
    draft: Annotated[str, typer.Argument(help="Folder or Hub id of the draft, in any format.")],
    repo: Annotated[
        str | None, typer.Argument(help="Hub id to write, such as my-org/my-draft.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Write into this new folder instead of to the Hub.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Hub id of the target, for the model card; default: the target named in the draft's files."
        ),
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="License of the draft, for a new card.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private.")
    ] = False,
) -> None:
    """Publish a draft: its unchanged files, a model card, and the folder custom_generate.

    dflash-hf convert writes other formats.
    """
    if (repo is None) == (to is None):
        raise ValueError("expected a Hub id or --to FOLDER, got both or neither; give one of them")
    check_place("DRAFT", draft)
    if to is not None and to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"expected a new or empty folder as --to, got {str(to)!r}; choose another")
    from dflash_hf.training.export import is_hub_id

    if repo is not None and not is_hub_id(repo):
        raise ValueError(
            f"expected a Hub id such as my-org/my-draft, got {repo!r}; write to a folder with --to"
        )
    if to is None:
        place = str(repo)
        told = f"https://huggingface.co/{place}"
    else:
        place = str(to.resolve())
        told = place
    # The repository is complete before anything is written to the place where others read it.
    with (
        TemporaryDirectory(prefix="dflash-push-") as made,
        Console(stderr=True).status(f"writing {escape(place)}"),
    ):
        write_repository(draft, Path(made), place, target, license)
        if to is None:
            # With `None`, the rule of an organization decides.
            upload(Path(made), place, private or None)
        else:
            shutil.copytree(made, to, dirs_exist_ok=True)
    typer.echo(told)


def write_repository(
    draft: str, folder: Path, place: str, target: str | None, license: str | None
) -> None:
    """Writes the content of a repository: the draft's own files, a card, and `custom_generate/generate.py`.

    `place` is where the folder will be, for the code that loads it. Raises `ValueError` if the draft is damaged, or if
    neither its files nor `target` name a target.
    """
    from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

    from dflash_hf.checkpoints.drafts import inspect_draft
    from dflash_hf.checkpoints.files import find_file, stored_tensors
    from dflash_hf.training.export import CARD

    found = inspect_draft(draft)
    target = target or found["target"]
    if target is None:
        raise ValueError(
            f"expected --target, got none, and the files of {draft} name no target; give --target"
        )
    files = {tensor.file for tensor in stored_tensors(draft).values()}
    for name in (CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME):
        file = find_file(draft, name, {})
        if file:
            files.add(file)
    for file in sorted(files):
        shutil.copyfile(file, folder / file.name)
    (folder / CARD).write_text(
        card_for(draft, found["format"], place, target, license), encoding="utf-8"
    )
    code = folder / "custom_generate" / "generate.py"
    code.parent.mkdir()
    code.write_text(CUSTOM_GENERATE.format(place=place), encoding="utf-8")


def card_for(draft: str, format: FormatName, place: str, target: str, license: str | None) -> str:
    """Returns the draft's own card with its new place in the code, or a new card. Both get the section `ON_CARD`."""
    from dflash_hf.checkpoints.files import find_file
    from dflash_hf.training.export import CARD, UNPLACED, CardFacts, card

    own = find_file(draft, CARD, {})
    if own is not None:
        text = own.read_text(encoding="utf-8").replace(UNPLACED, place)
        text = text.replace(f'"{draft}"', f'"{place}"').replace(f'"{own.parent}"', f'"{place}"')
    else:
        from dflash_hf.checkpoints.drafts import load_draft

        text = card(
            load_draft(draft, dtype="auto"),
            CardFacts(target=target, license=license),
            format,
            place,
        )
    heading = ON_CARD.strip().splitlines()[0]
    if heading in text:
        return text
    return text.rstrip("\n") + "\n" + ON_CARD.format(place=place)


def upload(folder: Path, repo: str, private: bool | None) -> None:
    """Creates the repository if it does not exist, and replaces its draft by a folder, as one commit.

    Raises `ValueError` if this fails, or if the repository should be private but exists and is public.
    """
    from huggingface_hub import HfApi

    from dflash_hf.errors import one_line

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        # The Hub ignores `private` for a repository that already exists.
        is_too_public = bool(private) and not api.repo_info(repo).private
        if not is_too_public:
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message="Upload a DFlash draft",
                delete_patterns=OF_A_DRAFT,
            )
    except Exception as error:  # of the client, of tokens and of the network, in many classes
        what = f"{type(error).__name__}: {one_line(error)}"
        advice = "log in with hf auth login, or write to a folder with --to"
        raise ValueError(f"expected to upload to {repo}, got {what}; {advice}") from error
    if is_too_public:
        raise ValueError(
            f"expected a private repository, got {repo}, which is there and public; make it private on the Hub, or "
            "choose another id"
        )
