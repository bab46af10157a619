"""Tries a release as someone who has nothing but the wheel: what it holds, what it installs, what it answers.

    make release-check        (or: python .ci/release_check.py; needs git, and an index with `build` and torch)

Builds sdist and wheel into build/release/dist and installs the wheel into a new environment, build/release/env,
without constraints: the newest of everything, as a user gets it. There the demo runs from an empty folder, and the
README from one that has demos/ of the clone and nothing else. The first thing that is not as it should be ends it with
status 1 and a sentence.

A bare torch may be a CUDA build of several gigabytes. Where that is too much, RELEASE_REQUIREMENTS names what to
install next to the wheel, with spaces between, from the indexes that pip is told of:

    make release-check RELEASE_REQUIREMENTS="torch==2.13.0+cpu"
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "release"
PACKAGED = {  # what is tracked, file or folder, and where the wheel has it
    "src/dflash_hf": "dflash_hf",
    "kernels/torch-ext/dflash_kernels": "dflash_kernels",
    "demos/toy/target": "dflash_hf/bundled_pair/target",
    "demos/toy/draft": "dflash_hf/bundled_pair/draft",
    "demos/toy/held_out.jsonl": "dflash_hf/bundled_pair/held_out.jsonl",
}
EXTRAS = {  # what asks for more than the wheel brings, and the extra that its refusal has to name
    "chat --web --target demos/toy/target --draft demos/toy/draft": "dflash-hf[demo]",
    "serve --target demos/toy/target --draft demos/toy/draft": "dflash-hf[serve]",
    "generate x --image demos/toy/vision/pictures/describe-0.png --target demos/toy/vision/target "
    "--draft demos/toy/vision/draft": "dflash-hf[vlm]",
}
OTHERS = (  # whose versions are printed
    "torch",
    "transformers",
    "triton",
    "huggingface_hub",
    "numpy",
    "accelerate",
    "safetensors",
    "tokenizers",
)
SHOW_VERSIONS = f"""
import importlib.metadata, platform
print("python", platform.python_version())
for name in {OTHERS}:
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not installed")
"""
# Every command there is, below the console script: groups have `commands` of their own.
LIST_COMMANDS = """
import typer
from dflash_hf.cli.main import app
def show(command, path):
    print(*path)
    for name, below in getattr(command, "commands", {}).items():
        show(below, [*path, name])
show(typer.main.get_command(app), [])
"""
WHERE = """
import importlib.metadata, dflash_hf, dflash_kernels
print(dflash_hf.__version__, importlib.metadata.version("dflash-hf"))
print(dflash_hf.__file__)
print(dflash_kernels.__file__)
"""


def check(is_right: bool, expected: str, got: object) -> None:
    """Ends the run with a sentence unless something is as it should be."""
    if not is_right:
        sys.exit(f"release-check: expected {expected}, got {got}")


def run(*command: str | Path, cwd: Path = ROOT, status: int = 0) -> str:
    """Runs a command that sees no environment but its own, and returns what it printed.

    Ends the run unless the exit status is `status`.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_CONSTRAINT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    check(
        done.returncode == status,
        f"status {status} from {' '.join(words)}",
        f"{done.returncode}\n{done.stderr}",
    )
    return done.stdout + done.stderr


def new_environment(name: str) -> Path:
    """Makes an empty environment and returns its folder of programs."""
    print(f"making {name}", flush=True)
    venv.create(WORK / name, clear=True, with_pip=True)
    return WORK / name / ("Scripts" if os.name == "nt" else "bin")


def contents(wheel: Path) -> dict[str, bytes]:
    """Reads the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def built(tools: Path) -> tuple[Path, str]:
    """Builds sdist and wheel; both hold what is tracked and nothing else, and the sdist builds the same wheel.

    Returns the wheel and the version that its name has.
    """
    dist, again = WORK / "dist", WORK / "from-sdist"
    for folder in (dist, again):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
    run(tools / "python", "-m", "build", "--sdist", "--wheel", "--outdir", dist)
    [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    run(tools / "python", "-m", "build", "--wheel", "--outdir", again, unpacked(sdist))
    files = contents(wheel)
    check(
        files == contents(next(again.glob("*.whl"))),
        "the sdist to build the same wheel",
        "another one",
    )

    tracked = run("git", "ls-files").splitlines()
    wanted = {
        f"{place}{path.removeprefix(source)}"
        for source, place in PACKAGED.items()
        for path in tracked
        if path == source or path.startswith(f"{source}/")
    }
    found = {name for name in files if ".dist-info/" not in name}
    unlike = found ^ wanted
    check(
        not unlike,
        "a wheel of the tracked files of both packages and the pair",
        f"besides or without {unlike}",
    )
    check(any(name.endswith("/licenses/LICENSE") for name in files), "LICENSE in the wheel", "none")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    beyond = inside - set(tracked) - {"PKG-INFO"}
    check(
        not beyond,
        "an sdist of tracked files only",
        f"{sorted(beyond)[:5]} too; remove or ignore them",
    )
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MB", flush=True)
    return wheel, wheel.name.split("-")[1]


def unpacked(sdist: Path) -> Path:
    """Unpacks an sdist and returns its folder."""
    shutil.rmtree(WORK / "unpacked", ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(WORK / "unpacked", filter="data")
    return WORK / "unpacked" / sdist.name.removesuffix(".tar.gz")


def installed(wheel: Path) -> Path:
    """Installs the wheel into a new environment, and what RELEASE_REQUIREMENTS names; says which versions came.

    Returns the environment's folder of programs.
    """
    programs = new_environment("env")
    requirements = os.environ.get("RELEASE_REQUIREMENTS", "").split()
    print(f"installing {' '.join([wheel.name, *requirements])}", flush=True)
    run(programs / "python", "-m", "pip", "install", "--quiet", wheel, *requirements)
    print(run(programs / "python", "-c", SHOW_VERSIONS), flush=True)
    return programs


def check_installed(programs: Path, version: str, cwd: Path) -> None:
    """What is imported is the wheel's, under one version."""
    program = programs / "dflash-hf"
    versions, *homes = run(programs / "python", "-c", WHERE, cwd=cwd).splitlines()
    check(set(versions.split()) == {version}, f"version {version} everywhere", versions)
    check(
        all(Path(home).is_relative_to(WORK / "env") for home in homes), "the wheel's modules", homes
    )
    said = run(program, "--version", cwd=cwd).strip()
    check(said == f"dflash-hf {version}", f"dflash-hf {version} from --version", said)
    citation = re.findall(
        r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )
    check(citation in ([], [version]), f"version {version} in CITATION.cff, or none", citation)
    run(programs / "python", "-m", "pip", "check", cwd=cwd)


def check_commands(programs: Path, cwd: Path) -> None:
    """Every command explains itself, and says which extra it lacks."""
    program = programs / "dflash-hf"
    paths = [
        line.split()
        for line in run(programs / "python", "-c", LIST_COMMANDS, cwd=cwd).split("\n")[:-1]
    ]
    for path in paths:
        said = run(program, *path, "--help", cwd=cwd)
        check("Usage:" in said, f"a usage from {' '.join(path)} --help", said)
    print(f"--help of {len(paths)} commands", flush=True)
    for line, extra in EXTRAS.items():
        said = run(program, *line.split(), cwd=cwd, status=2)
        check(
            extra in said and "Traceback" not in said, f"a sentence about {extra} from {line}", said
        )
    print("what an extra is for names it", flush=True)


def check_demo(programs: Path, cwd: Path) -> None:
    """The bundled pair of the package answers in an empty folder, with plain generate's text, and writes nothing."""
    before = package_files()
    print(run(programs / "dflash-hf", "demo", cwd=cwd), flush=True)
    print(
        run(programs / "dflash-hf", "generate", "Compute 41 + 80 - 99 + 14.", "--compare", cwd=cwd),
        flush=True,
    )
    written = [*(package_files() ^ before), *cwd.iterdir()]
    check(not written, "nothing written by demo and generate", written)


def package_files() -> set[tuple[Path, int]]:
    """Returns the files of the installed package with their sizes, compiled modules left out."""
    [package] = (WORK / "env").glob("**/site-packages/dflash_hf")
    return {
        (path, path.stat().st_size)
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def check_readme(programs: Path, cwd: Path) -> None:
    """The README's examples run from top to bottom, those that need neither a GPU nor a network."""
    examples = ROOT / "tests" / "helpers" / "examples.py"
    print(run(programs / "python", "-P", examples, ROOT / "README.md", cwd=cwd), flush=True)
    print(run(programs / "dflash-hf", "drafts", "--target", "qwen3-8b", cwd=cwd))
    said = run(programs / "dflash-hf", "inspect", "demos/toy/draft", cwd=cwd)
    check("block" in said, "what the draft is from inspect", said)


def main() -> None:
    """Builds, installs, tries."""
    tools = new_environment("tools")
    run(tools / "python", "-m", "pip", "install", "--quiet", "build")
    wheel, version = built(tools)
    programs = installed(wheel)
    with tempfile.TemporaryDirectory(prefix="dflash-hf-release-") as folder:
        cwd = Path(folder)
        check_installed(programs, version, cwd)
        check_demo(programs, cwd)
        (cwd / "demos").symlink_to(ROOT / "demos")
        check_commands(programs, cwd)
        check_readme(programs, cwd)
    print(f"release-check: dflash-hf {version} is what it should be")


if __name__ == "__main__":
    main()
