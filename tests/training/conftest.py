"""A tiny Qwen3 target, drafts for it and right-padded batches; everything random, seeded and on the CPU."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.training.collators import Batch, collate
from dflash_hf.training.example import Example
from helpers.training_command import SHALLOW, write_shallow_target
from tiny import randomise_heads

# A server without a model stands there, which a benchmark asks too
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

VOCAB, MASK, BLOCK, LAYERS = 48, 47, 6, 4

MakeDraft = Callable[..., DFlashDraftModel]


def draw_example(generator: torch.Generator, prompt: int, answer: int) -> Example:
    """A random example with a prompt and an answer of these lengths."""
    ids = torch.randint(1, MASK, (prompt + answer,), generator=generator).tolist()
    return Example.from_pair(ids[:prompt], ids[prompt:])


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copies of rows that `datasets` keeps go with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def shallow_target() -> None:
    """The target that `helpers.training_command.SMALL` names."""
    write_shallow_target(SHALLOW)


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the figures of a bench's page, for half a second: tests/bench looks at them."""
    monkeypatch.setattr("dflash_hf.bench.report.figures", lambda *args: {})


@pytest.fixture
def target() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def make_draft() -> MakeDraft:
    def make(fresh: bool = False, **changes: object) -> DFlashDraftModel:
        torch.manual_seed(1)
        fields: dict[str, object] = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "num_target_layers": LAYERS,
            "target_layer_ids": [0, 2],
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
        }
        draft = DFlashDraftModel(DFlashConfig(**{**fields, **changes}))
        if not fresh:
            randomise_heads(draft)
        return draft

    return make


@pytest.fixture
def examples() -> list[Example]:
    generator = torch.Generator().manual_seed(2)
    return [draw_example(generator, *lengths) for lengths in ((4, 9), (7, 3), (1, 14))]


@pytest.fixture
def batch(examples: list[Example]) -> Batch:
    return collate(examples)
