"""This module knows the keyword under which the installed Transformers passes a cache.

The keyword is `cache`, or `past_key_values` in older releases.

Inside this package a cache is called `cache`. Only this module knows both names. Calls of Transformers' forwards,
fields of its outputs and arguments of `generate` use `CACHE_NAME`. `given_cache` reads the cache that a caller has
passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from dflash_hf.errors import require

# The name is taken from the outputs, because in every release they have the same name as the forwards' argument.
_HAS_NEW_NAME = "cache" in BaseModelOutputWithPast.__dataclass_fields__
CACHE_NAME = "cache" if _HAS_NEW_NAME else "past_key_values"
# Releases with the new name also accept the old names, and warn.
ACCEPTED_NAMES = (
    ("cache", "past_key_values", "cache_params") if _HAS_NEW_NAME else ("past_key_values",)
)


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among the arguments of `generate`, under any of its names, or `None` if there is none.

    Raises:
        ValueError: If caches are passed under more than one name.
    """
    # A name with the value `None` counts as not passed, because wrappers pass their own default on.
    given = {name: arguments.get(name) for name in ACCEPTED_NAMES}
    return one_cache(**given)


def one_cache(**caches: Any) -> Any:
    """Returns the only cache that is not `None`, or `None` if there is none.

    Raises:
        ValueError: If more than one cache is not `None`.
    """
    # Two caches would hold two conversations, and one of them would be ignored silently.
    names = [name for name, cache in caches.items() if cache is not None]
    got = " and ".join(names)
    require(len(names) < 2, "one cache", got, f"pass it as {CACHE_NAME} alone")
    if not names:
        return None
    return caches[names[0]]
