"""This module reads the generation config of a request. `transformers chat` sends its flags of `generate` in it."""

from __future__ import annotations

import json
from typing import Any

import torch

from dflash_hf.serve.pair import Pair
from dflash_hf.serve.refusal import has_whole_characters, need

PARAM = "generation_config"
# Flag of `generate` -> the field of a request that has the same meaning.
FIELDS = {
    "max_new_tokens": "max_tokens",
    "do_sample": "do_sample",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
}
OF_TARGET = ("bos_token_id", "eos_token_id", "pad_token_id")
WITHOUT_EFFECT = ("transformers_version", "_from_model_config")


def with_flags(body: dict[str, Any], pair: Pair) -> dict[str, Any]:
    """Returns a request with the flags of its generation config as fields. Fields of the request itself come first.

    Raises:
        Refusal: If the config is not an object in JSON, or has a flag that the server does not support.
    """
    if PARAM not in body:
        return body
    flags = _read(body[PARAM])
    found: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in OF_TARGET:
            own = getattr(pair.target.generation_config, name)
            is_own = _tokens(value) == _tokens(own)
            need(is_own, PARAM, f"{name} as the target has it", value, "leave it out")
            continue
        what = f"{PARAM} with {', '.join(FIELDS)}"
        need(name in FIELDS, PARAM, what, name, "leave it out", "unsupported_parameter")
        found[FIELDS[name]] = value
    is_sampled = found.get("do_sample", True)
    need(isinstance(is_sampled, bool), PARAM, "do_sample as true or false", is_sampled)
    if not is_sampled:
        found["temperature"] = 0
    # The request has the same limit under its newer name.
    if "max_completion_tokens" in body:
        found.pop("max_tokens", None)
    return {**found, **body}


def _read(text: Any) -> dict[str, Any]:
    """Returns the flags of a config, which is a text in JSON."""
    flags: Any = None
    if isinstance(text, str):
        try:
            flags = json.loads(text)
        except (ValueError, RecursionError):
            flags = None
    # The JSON of the body may have contained halves of characters as escapes.
    is_read = isinstance(flags, dict) and has_whole_characters(flags)
    need(is_read, PARAM, f"{PARAM} as an object in JSON", text)
    return flags


def _tokens(value: Any) -> list[Any]:
    """Returns token ids as a list, whether they were given as one id, as several or not at all."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return value
    return [value]
