"""The keyword under which the installed Transformers passes a cache: `cache`, or `past_key_values` in older releases.

Inside this package a cache is called `cache`. The two names meet here alone: calls of Transformers' forwards, fields
of its outputs and arguments of `generate` go by `CACHE_NAME`, and what a caller has passed is read by `given_cache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from dflash_hf.errors import require

# Asked of the outputs, which every release fills under the name that its forwards take.
_HAS_NEW_NAME = "cache" in BaseModelOutputWithPast.__dataclass_fields__
CACHE_NAME = "cache" if _HAS_NEW_NAME else "past_key_values"
# Releases with the new name take the old ones too, and warn.
ACCEPTED_NAMES = (
    ("cache", "past_key_values", "cache_params") if _HAS_NEW_NAME else ("past_key_values",)
)


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among the arguments of `generate`, under whichever name it was passed, or `None`.

    Raises:
        ValueError: If caches are passed under several names.
    """
    # A name with `None` counts as not passed: wrappers hand their own default on.
    given = {name: arguments.get(name) for name in ACCEPTED_NAMES}
    return one_cache(**given)


def one_cache(**caches: Any) -> Any:
    """Returns the one of these that is not `None`, or `None`.

    Raises:
        ValueError: If there are several.
    """
    # Two caches would be two conversations, and one of them would silently not count.
    names = [name for name, cache in caches.items() if cache is not None]
    got = " and ".join(names)
    require(len(names) < 2, "one cache", got, f"pass it as {CACHE_NAME} alone")
    if not names:
        return None
    return caches[names[0]]
