"""The promise about files that nobody trusts: "hostile draft folders and prompt files, each answered by one sentence
within a second and 500 MB".

A draft's folder of any layout, or a file of prompts, is damaged and then read. Either it succeeds, and the draft can
be used, or it ends in a `ValueError` or `OSError` with one readable sentence; in any case in time, without much
memory, with every file as it was, and without running any code of the folder's.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from dflash_hf import DFlashDraftModel
from dflash_hf.checkpoints.drafts import load_draft
from dflash_hf.data.prompt_files import image_names, read_prompts, text_of
from dflash_hf.generation_config import TYPES, DFlashGenerationConfig
from fuzz.hostile_files import (
    BASES,
    DRAFTS,
    INDEX,
    PROMPTS,
    ROWS,
    TRAP,
    WEIGHTS,
    Become,
    Change,
    Cut,
    Drop,
    Header,
    HeaderLength,
    Insert,
    Mix,
    Pickle,
    Raw,
    Rename,
    Set,
    Twice,
    Write,
    base,
    places,
)

MAX_SECONDS = 1.0  # of the process's own time: others on the machine do not count
MAX_BYTES = 500 * 2**20
MAX_SENTENCE = 2000  # characters


@dataclass(frozen=True)
class HostileCase:
    """A valid draft or file of prompts, by its name in `BASES`, and what is done to it, in this order."""

    base: str
    changes: tuple[Change, ...]


# ---- the check


def check(case: HostileCase) -> None:
    """Damages a copy and reads it.

    Raises:
        AssertionError: If the promise does not hold.
    """
    _warm_up()
    with tempfile.TemporaryDirectory(prefix="dflash-hostile-") as outer:
        folder = Path(outer) / "draft"
        shutil.copytree(base(case.base), folder)
        for change in case.changes:
            change.apply(folder)
        before = _snapshot(folder)
        peak, resident, started = _peak(), _resident(), time.process_time()
        try:
            answer = _read(case.base, folder)
        except (ValueError, OSError) as error:
            _check_sentence(error)
            answer = None
        except Exception as error:
            raise AssertionError(
                f"expected a sentence for {case}, got {type(error).__name__}: {error}"
            ) from error
        seconds = time.process_time() - started
        assert seconds < MAX_SECONDS, f"{case} took {seconds:.1f} s"
        # Only a new peak says something about this case, and no case before it had one that was higher by so much.
        grown = _peak() - resident if _peak() > peak else 0
        assert grown < MAX_BYTES, f"{case} took {grown / 2**20:.0f} MB"
        assert _snapshot(folder) == before, f"{case} changed files"
        assert not (Path(outer) / TRAP).exists(), f"{case} ran code"
        if isinstance(answer, DFlashDraftModel):
            _check_usable(answer, case)


def _read(name: str, folder: Path) -> DFlashDraftModel | None:
    """Reads what was damaged, as the command line does."""
    if name not in PROMPTS:
        return load_draft(folder)
    for prompt in read_prompts(folder / f"prompts.{name}"):
        text_of(prompt).encode()
        image_names(prompt)
    return None


def _check_sentence(error: Exception) -> None:
    """Asserts that what is said is one sentence that a person can read."""
    text = str(error)
    shown = f"{type(error).__name__}: {text[:3000]}"
    assert type(error) in (ValueError, OSError), f"another kind of error: {shown}"
    assert text.startswith("expected "), f"not our own sentence: {shown}"
    assert len(text) <= MAX_SENTENCE, f"{len(text)} characters: {shown}"
    assert text.isprintable(), f"not on one line, or not to be printed: {shown!r}"
    assert ", got " in text, f"does not say what there is: {shown}"
    assert "; " in text, f"does not say what to do: {shown}"


def _check_usable(draft: DFlashDraftModel, case: HostileCase) -> None:
    """Asserts that a block can be run, in finite time."""
    config, weight = draft.config, draft.fc.weight
    options = draft.generation_config
    assert isinstance(options, DFlashGenerationConfig)
    options.validate_options(config.block_size, config.sample_from_anchor)
    started = time.process_time()
    with torch.no_grad():
        noise = torch.zeros(1, config.block_size, config.hidden_size, dtype=weight.dtype)
        context = torch.zeros(1, 3, weight.shape[1], dtype=weight.dtype)
        hidden = draft(noise, context).last_hidden_state
    assert hidden.shape == noise.shape, f"{case}: {tuple(hidden.shape)}"
    seconds = time.process_time() - started
    assert seconds < MAX_SECONDS, f"a block of {case} took {seconds:.1f} s"


@cache
def _warm_up() -> None:
    """Imports and compiles what is only needed the first time."""
    for name in BASES:
        draft = _read(name, base(name))
        if draft is not None:
            _check_usable(draft, HostileCase(name, ()))


def _snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder and what is in it."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        kind = b"link" if path.is_symlink() else b"folder" if path.is_dir() else b"file"
        found[str(path.relative_to(folder))] = kind + (path.read_bytes() if path.is_file() else b"")
    return found


def _peak() -> int:
    """The most memory that this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _resident() -> int:
    """What it holds now; where that cannot be asked for cheaply, its peak."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * resource.getpagesize() if file.exists() else _peak()


# ---- the cases

# JSON, and what only looks like it.
VALUES = (
    *(
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "2",
        "3",
        "4",
        "5",
        "13",
        "16",
        "48",
        "1024",
        "1025",
        "100000",
    ),
    *(
        "1048576",
        "1048577",
        "16777216",
        "2147483648",
        "9223372036854775808",
        "1" + "0" * 30,
        "-1" + "0" * 30,
    ),
    *("0.5", "1.0", "1e-300", "1e300", "1e999", "-1e999", "NaN", "-0.0", "Infinity"),
    *(
        '""',
        '"x"',
        '"\\ud800"',
        '"\\udc80"',
        '"\\u0000"',
        '"a\\nb"',
        '"\\u202e"',
        "[]",
        "{}",
        "[null]",
        "[[]]",
        "[{}]",
    ),
    *(
        "[1, 2]",
        "[-1, 0]",
        "[0, 5]",
        "[true]",
        "[[1]]",
        "[1e999]",
        '{"x": 1}',
        '{"": null}',
        '{"rope_type": "yarn"}',
    ),
    *(
        '{"rope_type": "llama3", "factor": 0}',
        '{"rope_type": "dynamic"}',
        '{"type": "yarn", "rope_type": "linear"}',
    ),
    *(
        '"full_attention"',
        '"sliding_attention"',
        '["full_attention", "full_attention"]',
        '["sliding_attention"]',
    ),
    *(
        '"gelu"',
        '"float16"',
        '"int8"',
        '"complex64"',
        '"float8_e4m3fn"',
        '"bool"',
        '"torch.bfloat16"',
        '"save"',
    ),
    *(
        '"dflash"',
        '"qwen3"',
        '"llama"',
        '"auto"',
        '"cuda_graph"',
        "{",
        "]",
        "'x'",
        "undefined",
        "1 2",
        "/**/1",
    ),
)
LONG = (
    Raw("[", 200_000),
    Raw("[", 900, "]"),
    Raw('{"a":', 100_000),
    Raw("1,", 10**6, before="[", after="1]"),
    Raw("x", 10**6, before='["', after='"]'),
    Raw("y", 10**6, before='"', after='"'),
    Raw("[],", 300_000, before="[", after="[]]"),
    Raw("0,", 10**5, before="[", after="0]"),
    Raw("9", 5000),
    Raw('"k#": 1,', 20_000, before="{", after='"x": 1}', numbered=True),
    Raw('"full_attention",', 10**5, before="[", after='"full_attention"]'),
)
KEYS = (
    *(
        "draft_vocab_size",
        "sliding_window",
        "is_causal",
        "rope_scaling",
        "rope_theta",
        "x",
        "quantization_config",
    ),
    *(
        "dtype",
        "torch_dtype",
        "model_type",
        "auto_map",
        "block_size",
        "selector_top_k",
        "conv_kernel_size",
        "",
    ),
    *(
        "layer_types",
        "target_layer_ids",
        "dflash_config",
        "transformer_layer_config",
        "markov_rank",
        "\ud800",
        "a\nb",
    ),
    *(
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "__class__",
        "use_swa",
        "tie_word_embeddings",
    ),
)
OPTIONS = (
    *sorted(TYPES),
    *("block_size", "verify_width", "engine", "proposal", "synchronize"),
    *(
        "watermarking_config",
        "compile_config",
        "continuous_batching_config",
        "assistant_model",
        "streamer",
        "self",
    ),
    *(name for name in dir(DFlashGenerationConfig)),
)
GARBAGE = (
    b"",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"\xef\xbb\xbf",
    b"\x00",
    b"\x00" * 64,
    b"\xc3\x28",
    b"\xed\xa0\x80",
)
GARBAGE += (
    b"[]",
    b"{}",
    b"null",
    b"3",
    b'"x"',
    b"{" * 50,
    b"\x80\x04N.",
    b"PK\x03\x04",
    b"<html>",
    b"{}\n{}",
    b"\r\n",
)
OTHERS = (
    "config.json",
    "generation_config.json",
    WEIGHTS,
    INDEX,
    "adapter_config.json",
    "model.py",
    "tokenizer.json",
)
PICKLES = (
    "pytorch_model.bin",
    "adapter_model.bin",
    "model.ckpt.index",
    WEIGHTS,
    "model.pt",
    "config.json",
)
SHARDS = (
    "../outside.safetensors",
    "/etc/passwd",
    "model.safetensors",
    "",
    ".",
    "..",
    "\ud800",
    "\udc80.safetensors",
)
SHARDS += (
    "a\0b.safetensors",
    "x" * 5000 + ".safetensors",
    "a\nb.safetensors",
    "C:\\x.safetensors",
    "pytorch_model.bin",
)


def cases() -> st.SearchStrategy[HostileCase]:
    """Drafts of every layout and files of prompts, with one to three changes."""
    return st.sampled_from(BASES).flatmap(
        lambda name: st.builds(
            HostileCase,
            st.just(name),
            st.lists(
                _row_changes(name) if name in PROMPTS else _draft_changes(name),
                min_size=1,
                max_size=3,
            ).map(tuple),
        )
    )


def _values() -> st.SearchStrategy[Raw]:
    return st.one_of(
        st.sampled_from(VALUES).map(Raw),
        st.sampled_from(VALUES).map(Raw),
        st.sampled_from(LONG),
        st.integers().map(lambda number: Raw(str(number))),
        st.floats().map(lambda number: Raw(json.dumps(number))),
        st.text(max_size=8).map(lambda text: Raw(json.dumps(text))),
        st.lists(st.integers(-2, 9), max_size=4).map(lambda numbers: Raw(json.dumps(numbers))),
        st.integers(1, 10**5).map(lambda depth: Raw("[", depth, "]")),
    )


def _contents() -> st.SearchStrategy[Raw | bytes]:
    return st.one_of(st.sampled_from(GARBAGE), st.binary(max_size=64), _values())


def _damages(files: tuple[str, ...]) -> st.SearchStrategy[Change]:
    """What can happen to any file."""
    names, thousandths = st.sampled_from(files), st.integers(0, 1000)
    what = st.sampled_from(("missing", "folder", "nowhere", "itself", "outside"))
    return st.one_of(
        st.builds(Cut, names, thousandths),
        st.builds(
            Insert,
            names,
            thousandths,
            st.sampled_from(GARBAGE) | st.binary(max_size=16),
            st.booleans(),
        ),
        st.builds(Become, names, what),
        st.builds(Write, names, _contents()),
    )


def _draft_changes(name: str) -> st.SearchStrategy[Change]:
    """Changes of a draft's folder."""
    config = json.loads((base(name) / "config.json").read_text())
    known = st.sampled_from(places(config))
    new = st.sampled_from(KEYS).map(lambda key: (key,))
    files = tuple(sorted(file.name for file in base(name).iterdir()))
    others = st.sampled_from(tuple(DRAFTS))
    options: st.SearchStrategy[Any] = st.dictionaries(
        st.sampled_from(OPTIONS) | st.text(max_size=3), _values().map(str), min_size=1, max_size=2
    )
    fields = st.sampled_from(("dtype", "shape", "data_offsets", "name", "", "extra"))
    tensors = [
        *(
            '"I32"',
            '"F64"',
            '"BF16"',
            '"F16"',
            '"BOOL"',
            '"F8_E4M3"',
            '"F4"',
            '"I64"',
            '"U8"',
            '"C64"',
            '"x"',
            '"d2t"',
        ),
        *(
            '"lm_head.weight"',
            '"layers.9.mlp.up_proj.weight"',
            '"a\\nb"',
            "[16]",
            "[0]",
            "[2, 8]",
            "[0, 64]",
            "[64, 0]",
        ),
        *(
            "[4294967296, 4294967296]",
            "[1, 1, 1, 16]",
            "[]",
            '"fc.weight"',
            '"\\u202e"',
            '"' + "z" * 5000 + '"',
        ),
    ]
    return st.one_of(
        st.builds(Set, st.just("config.json"), known, _values()),
        st.builds(Set, st.just("config.json"), known, _values()),
        st.builds(Set, st.just("config.json"), new, _values()),
        st.builds(Drop, st.just("config.json"), known),
        st.builds(
            Twice,
            st.sampled_from(files),
            st.sampled_from([*KEYS, *sorted(config)]),
            _values(),
            st.booleans(),
        ),
        options.map(lambda given: Write("generation_config.json", Raw(_object(given)))),
        options.map(lambda given: Write("generation_config.json", Raw(_object(given)))),
        _damages(files),
        st.builds(Write, st.sampled_from(OTHERS), _contents()),
        st.builds(
            Header, st.integers(0, 40), fields, st.sampled_from(tensors).map(Raw) | _values()
        ),
        st.builds(Header, st.integers(0, 40), fields, st.sampled_from(tensors).map(Raw)),
        st.builds(
            HeaderLength, st.sampled_from((0, 1, 7, 8, 100, 2**20, 10**8, 2**31, 2**63, 2**64 - 1))
        ),
        st.builds(
            Mix, others, st.sampled_from(("config.json", WEIGHTS, INDEX, "generation_config.json"))
        ),
        st.builds(Pickle, st.sampled_from(PICKLES)),
        st.builds(
            Rename,
            st.sampled_from(files),
            st.sampled_from((*OTHERS, "model.fp16.safetensors", "x")),
        ),
        st.builds(
            Set,
            st.just(INDEX),
            _index_places(name),
            _values() | st.sampled_from(SHARDS).map(_quoted),
        ),
        st.builds(Drop, st.just(INDEX), _index_places(name)),
    )


def _index_places(name: str) -> st.SearchStrategy[tuple[str | int, ...]]:
    """Places in an index, also where a draft has none: then nothing happens."""
    index = base("dflash-shards") / INDEX
    return st.sampled_from(
        [*places(json.loads(index.read_text())), ("weight_map", "x"), ("metadata", "x")]
    )


def _row_changes(name: str) -> st.SearchStrategy[Change]:
    """Changes of a file of prompts."""
    file = f"prompts.{name}"
    if name == "txt":
        return _damages((file,))
    known = st.sampled_from([(n, *place) for n, row in enumerate(ROWS) for place in places(row)])
    rows = (
        *(
            '{"messages": [1, 2]}',
            '{"messages": [{}]}',
            '{"messages": 5}',
            '{"messages": {}}',
            '{"messages": [[]]}',
        ),
        *(
            '{"messages": [{"role": "user"}]}',
            '{"messages": [{"content": "x"}]}',
            "[1, 2]",
            '"x"',
            "null",
            "{}",
            "3",
        ),
        *(
            '{"messages": [{"role": "user", "content": null}]}',
            '{"prompt": 5}',
            '{"prompt": ["a"]}',
            '{"prompt": ""}',
        ),
        *(
            '{"messages": [{"role": "user", "content": [{"type": "image", "path": 7}]}]}',
            '{"prompt": "\\ud800"}',
        ),
        *(
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            '{"messages": "x"}',
            '{"answer": "x"}',
        ),
        *(
            '{"messages": [{"role": "user", "content": [{"type": "video", "path": "x"}]}]}',
            '{"prompt": "\\u0000"}',
        ),
        *(
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            '{"prompt": "a", "prompt": 3}',
            "NaN",
        ),
        *(
            '{"messages": [{"role": "user", "content": [{"type": "image", "path": "a\\u0000b"}]}]}',
            "{",
            "\x00",
            "\ud800",
        ),
    )
    return st.one_of(
        st.builds(Set, st.just(file), known, _values()),
        st.builds(Set, st.just(file), known, _values()),
        st.builds(Drop, st.just(file), known),
        st.builds(Write, st.just(file), st.sampled_from(rows).map(Raw)),
        _damages((file,)),
    )


def _object(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in values.items()) + "}"


def _quoted(text: str) -> Raw:
    return Raw(json.dumps(text))
