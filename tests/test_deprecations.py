"""That a deprecated call of this package's fails the test that makes it: as a warning, and as a line of the log."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import transformers
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg

from helpers.deprecations import DeprecationLog

CALLS = """
def renamed(function):
    function(old=1)

def said(log):
    log.warning_once("`old` is deprecated! Use `new` instead.")
"""


def calls_of(module: str) -> dict[str, Any]:
    """Functions that make deprecated calls, as if they stood in a module of this name."""
    namespace: dict[str, Any] = {"__name__": module}
    exec(compile(CALLS, f"{module}.py", "exec"), namespace)
    return namespace


@deprecate_kwarg("old", "99.0.0", new_name="new")
def upstream(new: int) -> int:
    """What Transformers' own decorator warns of, if it is called with `old`."""
    return new


def test_a_renamed_argument_fails_in_this_package_alone() -> None:
    with pytest.warns(FutureWarning, match="old"):
        calls_of("somebody_else.models")["renamed"](upstream)
    with pytest.raises(FutureWarning, match="old"):
        calls_of("dflash_hf.generation.pretended")["renamed"](upstream)


@pytest.mark.parametrize("kind", [FutureWarning, DeprecationWarning])
@pytest.mark.parametrize("module", ["dflash_hf.cache.pretended", "transformers.models.pretended"])
def test_warnings_about_these_modules_are_errors(kind: type[Warning], module: str) -> None:
    with pytest.raises(kind):
        warnings.warn_explicit("it is deprecated", kind, f"{module}.py", 1, module)


@pytest.mark.parametrize(
    ("module", "is_ours"), [("dflash_hf.generation.pretended", True), ("somebody_else", False)]
)
def test_a_logged_deprecation_is_seen_in_our_calls(
    module: str, is_ours: bool, deprecations: DeprecationLog
) -> None:
    log: Any = logging.get_logger("transformers.utils.generic")
    calls_of(module)["said"](log)
    messages = deprecations.messages.copy()
    deprecations.messages.clear()  # or this test fails by it
    assert messages == ["`old` is deprecated! Use `new` instead."] * is_ours


def test_the_old_name_of_a_cache_is_seen(deprecations: DeprecationLog) -> None:
    outputs: Any = transformers.modeling_outputs.BaseModelOutputWithPast()
    if not hasattr(outputs, "cache"):
        pytest.skip("this Transformers knows a cache by its old name alone")
    namespace: dict[str, Any] = {"__name__": "dflash_hf.target_model.pretended", "outputs": outputs}
    exec("outputs.past_key_values", namespace)
    assert len(deprecations.messages) == 1
    deprecations.messages.clear()
