"""`import dflash_hf` alone makes Transformers know drafts, whichever of the two is imported first."""

import importlib.util
import subprocess
import sys
import types

import pytest

import dflash_hf
from dflash_hf import patching
from helpers.source_tree import ROOT

DRAFT, TARGET = (str(ROOT / "demos/toy" / name) for name in ("draft", "target"))
SEEING = str(ROOT / "demos/toy/vision/target")
SOURCES = [str(ROOT / folder) for folder in ("src", "kernels/torch-ext")]

USE = f"""
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, Qwen3Config
from transformers.utils.import_utils import is_torchvision_available
assert not any(name.startswith("dflash_hf.modeling") for name in sys.modules), "nothing of ours is loaded yet"
target = AutoModelForCausalLM.from_pretrained({TARGET!r})
inputs = AutoTokenizer.from_pretrained({TARGET!r})("What is 3 + 4?", return_tensors="pt")
config = Qwen3Config(dflash_config={{"mask_token_id": 1, "target_layer_ids": [1]}})
stranger = types.SimpleNamespace(config=config)
try:
    target.generate(**inputs, max_new_tokens=4, assistant_model=stranger)
except ValueError as error:
    assert "load it with dflash_hf.load_draft" in str(error), error
else:
    raise AssertionError("a draft of another class has to be explained")
config = AutoConfig.from_pretrained({DRAFT!r})
draft = AutoModel.from_pretrained({DRAFT!r})
assert (type(config).__name__, type(draft).__name__) == ("DFlashConfig", "DFlashDraftModel")
assert type(AutoModel.from_config(config)) is type(draft)
assert type(AutoModelForCausalLM.from_pretrained({DRAFT!r})) is type(draft)
plain, ours = (target.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=a) for a in (None, draft))
assert plain.tolist() == ours.tolist()
assert draft.last_stats is not None
if not is_torchvision_available():
    assert type(AutoProcessor.from_pretrained({SEEING!r})).__module__ == "dflash_hf.processing_qwen3_vl"
"""


def run(code: str) -> None:
    """Runs code in a fresh interpreter."""
    code = f"import sys, types\nsys.path[:0] = {SOURCES}\n{code}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr


# Which of the two is imported first. Each has a process of its own, forked from one that has what both import.
ORDERS = [
    "import dflash_hf",
    "from transformers import AutoModelForCausalLM, AutoProcessor\nimport dflash_hf",
]
IN_FORKS = f"""
import os, traceback
import accelerate, huggingface_hub, PIL.Image, scipy.stats, sympy, tokenizers, torch._dynamo
assert "transformers" not in sys.modules
for order in {ORDERS}:
    child = os.fork()
    if not child:
        try:
            exec(order + {USE!r})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, order
"""


def test_importing_is_all_it_takes() -> None:
    pytest.importorskip("PIL")
    run(IN_FORKS)


def test_beside_transformers_the_import_adds_nothing_but_itself() -> None:
    run(
        "import transformers\nbefore = set(sys.modules)\nimport dflash_hf\n"
        "added = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert added - set(sys.stdlib_module_names) == {'dflash_hf'}, added"
    )


def test_every_public_name_and_module_is_an_attribute() -> None:
    assert set(dflash_hf.__all__) <= set(dir(dflash_hf))
    # Another copy of the package's own module: nothing has been looked up in it yet.
    spec = importlib.util.find_spec("dflash_hf")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    for name in dflash_hf.__all__:
        assert name in dir(fresh)
        assert getattr(fresh, name) is getattr(dflash_hf, name)
    assert isinstance(fresh.ops, types.ModuleType)
    for name in ("nonsense", "__nonsense__"):
        with pytest.raises(AttributeError, match=name):
            getattr(fresh, name)


def test_registering_again_changes_nothing() -> None:
    from transformers import GenerationMixin

    generate, finders = GenerationMixin.generate, list(sys.meta_path)
    patching.register()
    assert GenerationMixin.generate is generate
    assert sys.meta_path == finders
