"""A Transformers newer than any that was tested is said once, on the first call with a draft."""

import pytest
import transformers

from dflash_hf.generation import generate as tested
from tiny import prompts, tiny_draft, tiny_target


@pytest.mark.parametrize(
    ("installed", "is_said"),
    [
        ("5.16.0", False),
        (tested.NEWEST_TRANSFORMERS, False),
        (f"{tested.NEWEST_TRANSFORMERS}.dev0", False),
        ("5.999.0", True),
        ("5.999.0.dev0", True),
    ],
)
def test_only_a_newer_release_is_said_once(
    installed: str, is_said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tested._warn_if_newer.cache_clear()
    monkeypatch.setattr(transformers, "__version__", installed)
    target = tiny_target("qwen3")
    draft = tiny_draft(target)
    for _ in range(2):
        target.generate(**prompts([5], seed=0), assistant_model=draft, max_new_tokens=2)
    said = [record.getMessage() for record in caplog.records if record.name == tested.__name__]
    expected = f"up to {tested.NEWEST_TRANSFORMERS}; this is {installed}"
    assert len(said) == is_said
    assert all(expected in line for line in said)
