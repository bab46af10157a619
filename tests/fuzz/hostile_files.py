"""Small valid drafts of every layout and files of prompts, and the ways in which `hostile` damages them.

A change is a frozen dataclass whose `repr` is Python; `apply` does it to a folder, and does nothing where there is
nothing to do it to (an earlier change took the file away).
"""

from __future__ import annotations

import atexit
import json
import pickle
import shutil
import struct
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_hf.checkpoints.drafts import save_draft
from helpers.layouts import DFLASH2, FULL, OWN, SLIDING, make_draft

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Name -> the layout, and a draft that uses what the layout has.
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {**OWN, "draft_vocab_size": 13}),
    "dflash-shards": ("dflash", {}),
    "zlab": ("zlab", {"layer_types": [SLIDING, FULL], "sliding_window": 5, **DFLASH2}),
    "speculators": (
        "speculators",
        {
            **OWN,
            "draft_vocab_size": 13,
            "layer_types": [SLIDING, FULL],
            "sliding_window": 5,
            "window_from_anchor": True,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "muse": ("muse", {"raw_input_embeddings": True, "is_causal": False}),
    "deepspec": ("deepspec", {**OWN, "is_causal": False, "sample_from_anchor": True}),
}
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "one", "kind": "a"},
    {
        "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "two"}],
        "answer": "x",
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "three"}],
            }
        ]
    },
)
PROMPTS = {"jsonl": "".join(json.dumps(row) + "\n" for row in ROWS), "txt": "one\n\ntwo\nthree\n"}
BASES = (*DRAFTS, *PROMPTS)


@dataclass(frozen=True)
class Raw:
    """A piece of a file as it stands there, which need not be JSON: `text` so many times, then `close` as often.

    Around them `before` and `after`; with `numbered`, each `#` of `text` is a number that no other has.
    """

    text: str
    times: int = 1
    close: str = ""
    before: str = ""
    after: str = ""
    numbered: bool = False

    def __str__(self) -> str:
        texts = (
            self.text.replace("#", str(n)) if self.numbered else self.text
            for n in range(self.times)
        )
        return "".join([self.before, *texts, self.close * self.times, self.after])


@dataclass(frozen=True)
class Set:
    """In a JSON file (or a row of a `.jsonl`, by its number as the first of `place`), puts a value at a place."""

    file: str
    place: tuple[str | int, ...]
    value: Raw

    def apply(self, folder: Path) -> None:
        """Does it."""
        _edit(folder / self.file, self.place, self.value)


@dataclass(frozen=True)
class Drop:
    """Takes a key away."""

    file: str
    place: tuple[str | int, ...]

    def apply(self, folder: Path) -> None:
        """Does it."""
        _edit(folder / self.file, self.place, None)


@dataclass(frozen=True)
class Twice:
    """A key that stands in a JSON file a second time, before or behind the others."""

    file: str
    key: str
    value: Raw
    first: bool

    def apply(self, folder: Path) -> None:
        """Does it."""
        file = folder / self.file
        text = file.read_text(errors="replace").strip() if file.is_file() else ""
        if text.startswith("{") and text.endswith("}"):
            pair, inner = f"{json.dumps(self.key)}: {self.value}", text[1:-1]
            _write(
                file,
                ("{" + ", ".join([pair, inner] if self.first else [inner, pair]) + "}").encode(),
            )


@dataclass(frozen=True)
class Write:
    """A file with this content, in the place of what was there."""

    file: str
    content: Raw | bytes

    def apply(self, folder: Path) -> None:
        """Does it."""
        _write(
            folder / self.file,
            self.content if isinstance(self.content, bytes) else _encoded(str(self.content)),
        )


@dataclass(frozen=True)
class Cut:
    """Keeps so many thousandths of a file."""

    file: str
    thousandths: int

    def apply(self, folder: Path) -> None:
        """Does it."""
        if (file := folder / self.file).is_file():
            content = file.read_bytes()
            _write(file, content[: len(content) * self.thousandths // 1000])


@dataclass(frozen=True)
class Insert:
    """Bytes at so many thousandths of a file, over what is there or between it."""

    file: str
    thousandths: int
    content: bytes
    over: bool

    def apply(self, folder: Path) -> None:
        """Does it."""
        if (file := folder / self.file).is_file():
            content = file.read_bytes()
            at = len(content) * self.thousandths // 1000
            _write(
                file, content[:at] + self.content + content[at + len(self.content) * self.over :]
            )


@dataclass(frozen=True)
class Become:
    """A file becomes something else: `missing`, `folder`, or a link to `nowhere`, `itself` or `outside` the folder."""

    file: str
    what: str

    def apply(self, folder: Path) -> None:
        """Does it."""
        file = folder / self.file
        content = file.read_bytes() if file.is_file() else b"{}"
        _remove(file)
        if self.what == "folder":
            file.mkdir()
        elif self.what == "nowhere":
            file.symlink_to(folder / "nothing is here")
        elif self.what == "itself":
            file.symlink_to(file)
        elif self.what == "outside":
            (folder.parent / "outside").write_bytes(content)
            file.symlink_to(folder.parent / "outside")


@dataclass(frozen=True)
class Rename:
    """A file under another name."""

    file: str
    name: str

    def apply(self, folder: Path) -> None:
        """Does it."""
        if (folder / self.file).is_file() and self.name != self.file:
            _remove(folder / self.name)
            (folder / self.file).rename(folder / self.name)


@dataclass(frozen=True)
class Header:
    """In the header of a safetensors file: the value of a tensor's field (`""`: of all of it), the tensor by number.

    With the field `"name"` the tensor gets that name.
    """

    tensor: int
    field: str
    value: Raw

    def apply(self, folder: Path) -> None:
        """Does it."""
        file = _weights_of(folder)
        if file is None or (parts := _split(file.read_bytes())) is None:
            return
        header, body = parts
        names = sorted(header.keys() - {"__metadata__"})
        if not names:
            return
        name, mark = names[self.tensor % len(names)], "@@@"
        if self.field == "name":
            header[mark] = header.pop(name)
        elif self.field and isinstance(header[name], dict):
            header[name][self.field] = mark
        else:
            header[name] = mark
        text = json.dumps(header).replace(json.dumps(mark), str(self.value))
        _write(file, _joined(_encoded(text), body))


@dataclass(frozen=True)
class HeaderLength:
    """A safetensors file that lies about the length of its header."""

    length: int

    def apply(self, folder: Path) -> None:
        """Does it."""
        if (file := _weights_of(folder)) is not None:
            _write(file, struct.pack("<Q", self.length) + file.read_bytes()[8:])


@dataclass(frozen=True)
class Mix:
    """The config, or the weights, of another draft."""

    draft: str
    file: str

    def apply(self, folder: Path) -> None:
        """Does it."""
        if (theirs := base(self.draft) / self.file).is_file():
            _write(folder / self.file, theirs.read_bytes())


@dataclass(frozen=True)
class Pickle:
    """A pickle that makes a file when it is read, under a name that loaders look for."""

    file: str

    def apply(self, folder: Path) -> None:
        """Does it."""
        _write(folder / self.file, pickle.dumps(Trap(str(folder.parent / TRAP))))


TRAP = "the pickle was read"


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


Change = (
    Set
    | Drop
    | Twice
    | Write
    | Cut
    | Insert
    | Become
    | Rename
    | Header
    | HeaderLength
    | Mix
    | Pickle
)


@cache
def base(name: str) -> Path:
    """The folder of a valid draft, or of valid prompts; saved once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-hostile-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if name in PROMPTS:
        (folder / f"prompts.{name}").write_text(PROMPTS[name])
        return folder
    layout, settings = DRAFTS[name]
    draft = make_draft(**settings)
    if name == "dflash-shards":
        draft.generation_config.verify_width = 2
        draft.save_pretrained(folder, max_shard_size="4KB")
    else:
        save_draft(draft, folder, layout)  # type: ignore[arg-type]
    return folder


def places(content: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value, also inside dictionaries and lists."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        inner = sorted(content.items())
    elif isinstance(content, list):
        inner = list(enumerate(content))
    found: list[tuple[str | int, ...]] = []
    for key, value in inner:
        found += [(*prefix, key), *places(value, (*prefix, key))]
    return found


def _edit(file: Path, place: tuple[str | int, ...], value: Raw | None) -> None:
    """Sets or (None) drops what is at a place of a JSON file, or of a row of a `.jsonl`, if it can."""
    try:
        text = file.read_text(encoding="utf-8")
        rows = text.splitlines() if file.suffix == ".jsonl" else [text]
        at = int(place[0]) if file.suffix == ".jsonl" else 0
        content: Any = [json.loads(rows[at])]
        holder, key = content, 0
        for step in place[1:] if file.suffix == ".jsonl" else place:
            holder, key = holder[key], step  # type: ignore[assignment]
        if value is None:
            del holder[key]
        else:
            holder[key] = "@@@"
        rows[at] = json.dumps(content)[1:-1].replace('"@@@"', str(value))
    # An earlier change left nothing there
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    _write(file, _encoded("\n".join(rows)))


def _weights_of(folder: Path) -> Path | None:
    """The file of weights; of several, the first."""
    return next((file for file in sorted(folder.glob("*.safetensors")) if file.is_file()), None)


def _split(content: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Header and body of a safetensors file, if it has them."""
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
    except (struct.error, ValueError, RecursionError):
        return None
    return (header, content[8 + length :]) if isinstance(header, dict) else None


def _joined(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _remove(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _write(file: Path, content: bytes) -> None:
    _remove(file)  # a link must not lead out of the folder
    file.write_bytes(content)
