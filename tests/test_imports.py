"""What `import dflash_hf` and the command line load and offer: little, and all of it documented."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
import types
from dataclasses import dataclass

from helpers.source_tree import ROOT, imports, read_modules

NOT_LOADED_BY_IMPORT = (
    "torch",
    "transformers",
    "gradio",
    "uvicorn",
    "datasets",
    "matplotlib",
    "pandas",
)


def undocumented_exports(package: types.ModuleType) -> list[str]:
    """Names in `__all__` that are missing, or have no docstring of their own (a dataclass's generated one is none)."""
    wrong: list[str] = []
    for name in package.__all__:
        doc = getattr(getattr(package, name, None), "__doc__", None)
        if not hasattr(package, name):
            wrong.append(f"{name} is in __all__ but not in {package.__name__}")
        elif not doc or doc.startswith(f"{name}("):
            wrong.append(f"{name} has no docstring")
    return wrong


def test_public_names_exist_and_are_documented() -> None:
    package = importlib.import_module("dflash_hf")
    assert list(package.__all__), "dflash_hf.__all__ is empty"
    assert not (wrong := undocumented_exports(package)), "\n".join(wrong)


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` are loaded after `code` ran in a fresh interpreter."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "kernels/torch-ext"))
    code = f"{code}\nimport sys\nprint(*[name for name in {names} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1].split()


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import json", ("json", "gradio")) == ["json"]
    assert not (loaded := loaded_by("import dflash_hf", NOT_LOADED_BY_IMPORT)), (
        f"import dflash_hf loads {loaded}"
    )


# What is imported under another name than it is installed by, or is there for sure with another package.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "markupsafe": "jinja2",
    "math_verify": "math-verify",
    "starlette": "gradio",
    "uvicorn": "transformers[serving]",
    "regex": "transformers",
    "tokenizers": "transformers",
    "yaml": "pyyaml",
}


def test_packages_that_are_imported_are_declared() -> None:
    """Those of others bring them today: a release of theirs that does without them would take them away."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = {
        re.split(r"[<>=; ]", line)[0].replace("-", "_")
        for line in [*project["dependencies"], *extras]
    }
    missing = set[str]()
    for module in read_modules():
        for _, name in imports(module):
            package = name.partition(".")[0]
            is_known = package in sys.stdlib_module_names or package.startswith("dflash")
            if module.name.startswith("dflash") and not is_known:
                missing |= {package} - declared if package not in DISTRIBUTIONS else set()
    assert not missing
    assert {name.replace("-", "_") for name in DISTRIBUTIONS.values()} <= declared


COMMANDS = (
    "generate",
    "demo",
    "chat",
    "convert",
    "doctor",
    "inspect",
    "drafts",
    "push",
    "serve",
    "train",
    "tune",
)
GROUPED = ("bench", "bench prepare", "bench compare")
COMMAND_LINES = [
    ["--help"],
    ["--nonsense"],
    *([*name.split(), what] for name in (*COMMANDS, *GROUPED) for what in ("--help", "--nonsense")),
]


def test_help_and_wrong_options_load_nothing_heavy() -> None:
    code = f"""
from typer.testing import CliRunner
from dflash_hf.cli.main import app
assert {{c.callback.__name__ for c in app.registered_commands}} == set({COMMANDS})
assert {{c.typer_instance.info.name for c in app.registered_groups}} == {{'bench'}}
for line in {COMMAND_LINES}:
    result = CliRunner().invoke(app, line)
    assert result.exit_code == (0 if "--help" in line else 2), (line, result.output)
"""
    assert not (loaded := loaded_by(code, NOT_LOADED_BY_IMPORT)), f"the command line loads {loaded}"


def test_missing_and_generated_docstrings_are_reported() -> None:
    package = types.ModuleType("fake")
    package.__all__ = ["Written", "Generated", "Missing"]
    package.Written = type("Written", (), {"__doc__": "Says what it is."})
    package.Generated = dataclass(type("Generated", (), {"__annotations__": {"x": int}}))
    assert undocumented_exports(package) == [
        "Generated has no docstring",
        "Missing is in __all__ but not in fake",
    ]
