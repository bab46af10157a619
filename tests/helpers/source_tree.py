"""The project's Python sources as syntax trees, for tests that read code without running it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Folder of source -> what stands before the module's path in its dotted name.
SOURCES = {"src": "", "kernels/torch-ext": "", "demos": "demos.", "benchmarks": "benchmarks."}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its dotted name, whether it is a package's `__init__`, its text and its syntax tree."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, name: str, text: str, is_package: bool = False) -> "Module":
        """Read `text` as the module `name`."""
        return cls(name, is_package, text, ast.parse(text))

    def at(self, node: ast.AST, message: str) -> str:
        """A violation, with the place that an editor can jump to."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {message}"


@cache
def read_modules() -> list[Module]:
    """Every Python file of the product, in a stable order; for all who only read them."""
    modules: list[Module] = []
    for folder, prefix in SOURCES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = prefix + ".".join(parts[:-1] if is_package else parts)
            modules.append(
                Module.parse(name.rstrip("."), path.read_text(encoding="utf-8"), is_package)
            )
    return modules


@cache
def nodes(module: Module) -> list[ast.AST]:
    """Every node of a module's tree, for rules that look at all of them."""
    return list(ast.walk(module.tree))


@cache
def imports(module: Module) -> list[tuple[ast.stmt, str]]:
    """Each import statement, also lazy and type-checking ones, with the longest dotted name that it may bring in."""
    return list(_imports(module))


def _imports(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(
                    parents[: len(parents) - node.level + 1]
                    + ([node.module] if node.module else [])
                )
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def imported_modules(module: Module, names: set[str]) -> Iterator[tuple[ast.stmt, str]]:
    """Each import that leads to one of `names`, as that name: `from package.module import X` is the module."""
    for node, target in imports(module):
        found = target if target in names else target.rpartition(".")[0]
        if found in names and found != module.name:
            yield node, found


def import_graph(modules: list[Module]) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports. The implicit import of a parent package is left out."""
    names = {module.name for module in modules}
    return {
        module.name: {target for _, target in imported_modules(module, names)} for module in modules
    }


@cache
def functions(module: Module) -> list[Function]:
    """Every function of a module: nested ones and methods too."""
    return [node for node in nodes(module) if isinstance(node, Function)]


def is_jit(function: Function) -> bool:
    """Whether a function is compiled by Triton: its arguments are annotated by the launch, not in the source."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def decorated(function: Function, *names: str) -> bool:
    """Whether one of the decorators ends in one of `names`."""
    return any(
        ast.unparse(decorator).rpartition(".")[2] in names for decorator in function.decorator_list
    )
