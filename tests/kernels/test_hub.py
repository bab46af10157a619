"""The folder is what the Kernel Hub's builder and loader expect, as far as that can be known without building it.

The builder reads `build.toml`, copies the package's Python files into `build/torch-<backend>/`, puts a namespace of
its own in the place of `_ops.py` and writes `metadata.json`. The loader imports that folder under a name of its own.
Where Hugging Face's package `kernels` is installed, its own parser and loader are asked as well.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dflash_kernels

ROOT = Path(__file__).resolve().parents[2] / "kernels"
PACKAGE = ROOT / "torch-ext" / "dflash_kernels"
# Of edition 5: huggingface/kernels, kernels-data/src/config/v5.rs.
GENERAL = {
    "name",
    "version",
    "edition",
    "license",
    "upstream",
    "source",
    "minver",
    "backends",
    "cuda",
    "hub",
}
GENERAL |= {"kernel-depends", "neuron", "python-depends", "tpu", "xpu"}
BACKENDS = {"cann", "cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu"}
# What a kernel may import besides itself: the Hub installs nothing that `python-depends` does not name.
MAY_IMPORT = {"torch", "triton"}
NAMESPACE = "_dflash_kernels_0123abc"
OPS = f'''"""What the builder writes."""

import torch

ops = torch.ops.{NAMESPACE}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{NAMESPACE}::{{op_name}}"
'''


def read_build() -> dict[str, Any]:
    """Returns `build.toml`."""
    return tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))


def build(root: Path, backend: str) -> Path:
    """Lays a built variant out as the builder does."""
    variant = root / "build" / f"torch-{backend}"
    shutil.copytree(PACKAGE, variant, ignore=shutil.ignore_patterns("__pycache__"))
    (variant / "_ops.py").write_text(OPS)
    general = read_build()["general"]
    facts = {"id": f"{NAMESPACE}_{backend}", "python-depends": [], "backend": {"type": backend}}
    facts |= {key: general[key] for key in ("name", "version", "license")}
    (variant / "metadata.json").write_text(json.dumps(facts))
    return variant


@pytest.fixture
def clean_modules() -> Iterator[None]:
    """Forgets what a test has imported."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(NAMESPACE):
            del sys.modules[name]


def test_the_builders_file_has_the_keys_of_its_edition() -> None:
    found = read_build()
    assert found.keys() == {"general", "torch-noarch"}
    general = found["general"]
    assert general.keys() <= GENERAL
    assert general.keys() >= {"name", "version", "edition", "license", "backends"}
    assert general["edition"] == 5
    assert isinstance(general["version"], int)
    assert re.fullmatch("[a-z][a-z0-9-]*[a-z0-9]", general["name"])
    assert set(general["backends"]) <= BACKENDS
    assert found["torch-noarch"].keys() <= {"pyext", "cuda_capabilities", "rocm_archs"}
    # The package stands where the builder looks for it, and nothing but Python is in it.
    assert general["name"].replace("-", "_") == PACKAGE.name
    assert [path.name for path in (ROOT / "torch-ext").iterdir() if path.name != "__pycache__"] == [
        PACKAGE.name
    ]
    files = [
        path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert {path.suffix for path in files} == {".py"}
    assert "_ops.py" in {path.name for path in PACKAGE.iterdir()}


def test_the_package_never_says_its_own_name_in_an_import() -> None:
    allowed = MAY_IMPORT | set(sys.stdlib_module_names)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            assert {name.partition(".")[0] for name in names} <= allowed, path


def check_loaded(module: ModuleType) -> None:
    """A loaded copy computes, in a namespace of its own, and is not the package of this environment."""
    assert module is not dflash_kernels
    assert sorted(module.__all__) == sorted(dflash_kernels.__all__)
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0]])
    assert module.argmax(logits).tolist() == [1, 0]
    assert module.argmax is not dflash_kernels.argmax
    for name in module.__all__:
        assert hasattr(getattr(torch.ops, NAMESPACE), name), name


def load(name: str, variant: Path) -> Any:
    """Imports a built variant as the loader does."""
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("clean_modules")
def test_a_built_copy_loads_under_another_name(tmp_path: Path) -> None:
    variant = build(tmp_path, "cpu")
    name = f"{NAMESPACE}_cpu"
    own = {
        key: value for key, value in sys.modules.items() if key.split(".")[0] == "dflash_kernels"
    }
    check_loaded(load(name, variant))
    assert all(
        str(variant) in str(sys.modules[key].__file__)
        for key in sys.modules
        if key.startswith(name)
    )
    assert {key: sys.modules[key] for key in own} == own


@pytest.mark.usefixtures("clean_modules")
def test_without_triton_definitions_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "triton" else find_spec(name, *a),
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = load(f"{NAMESPACE}_cpu", build(tmp_path, "cpu"))
    check_loaded(module)
    for name in module.__all__:
        assert list(getattr(module, name).op._backend_fns) == [None], (
            "nothing but the definition is registered"
        )


@pytest.mark.usefixtures("clean_modules")
def test_the_hubs_own_parser_and_loader_take_it(tmp_path: Path) -> None:
    # The folder `kernels/` of this repository is found under that name too, where the root is on the path.
    hub: Any = pytest.importorskip(
        "kernels", reason="Hugging Face's package `kernels` is not installed"
    )
    if not hasattr(hub, "get_local_kernel"):
        pytest.skip("Hugging Face's package `kernels` is not installed")
    config: Any = importlib.import_module("kernels._rust")
    assert [str(backend) for backend in config.Build.open(ROOT).general.backends] != []
    (tmp_path / "bad").mkdir()
    text = (ROOT / "build.toml").read_text(encoding="utf-8")
    (tmp_path / "bad" / "build.toml").write_text(text.replace("dflash-kernels", "dflash_kernels"))
    with pytest.raises(ValueError, match="Invalid kernel name"):
        config.Build.open(tmp_path / "bad")
    for backend in ("cuda", "cpu"):
        variant = build(tmp_path, backend)
        # The loader looks for the folder of the package to see that this is a kernel, and imports what is above it.
        (variant / PACKAGE.name).mkdir()
        (variant / PACKAGE.name / "__init__.py").write_text("")
    check_loaded(hub.get_local_kernel(tmp_path))
