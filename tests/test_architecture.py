"""The project's structure as a test: who may import whom, how long things get, what must be typed and documented.

Everything is read from the syntax trees of src/, kernels/, demos/ and benchmarks/; nothing there is executed. A rule
is a function from the modules to its violations, and is also shown small bad sources that it must report: a check that
cannot fail is not one. What the code computes is not tested here.
"""

import ast
import graphlib
from collections.abc import Callable

import pytest

from helpers.source_tree import (
    Function,
    Module,
    decorated,
    functions,
    import_graph,
    imported_modules,
    imports,
    is_jit,
    nodes,
    read_modules,
)

# The import order: its own level and lower ones. A package's line is for all that is in it, `dflash_hf`'s for itself.
LEVELS = {
    "dflash_kernels": 0,
    "dflash_hf.undo": 0,
    "dflash_hf.errors": 1,
    "dflash_hf.hosts": 1,
    "dflash_hf.devices": 1,
    "dflash_hf.plot_style": 1,
    "dflash_hf.tables": 1,
    "dflash_hf.layer_configs": 1,
    "dflash_hf.configuration_dflash": 1,
    "dflash_hf.processing_qwen3_vl": 1,
    "dflash_hf.block.cache_name": 1,
    "dflash_hf.block.positions": 1,
    "dflash_hf.target_model.user_code": 2,
    "dflash_hf.checkpoints.names": 1,
    "dflash_hf.ops": 2,
    "dflash_hf.joint_products": 2,
    "dflash_hf.packed_weights": 2,
    "dflash_hf.generation_config": 2,
    "dflash_hf.block": 2,
    "dflash_hf.checkpoints": 2,
    "dflash_hf.data": 2,
    "dflash_hf.draft_model": 2,
    "dflash_hf.cache": 3,
    "dflash_hf.draft_model.dflash2": 3,
    "dflash_hf.draft_model.gemma4": 3,
    "dflash_hf.draft_model.laguna": 3,
    "dflash_hf.draft_model.layers": 3,
    "dflash_hf.modeling_dflash": 3,
    "dflash_hf.checkpoints.drafts": 4,
    "dflash_hf.target_model": 4,
    "dflash_hf.generation": 5,
    "dflash_hf.pair": 6,
    "dflash_hf.training": 6,
    # The public surface and what is built on it; that they do not go in circles is the cycle rule's business.
    "dflash_hf": 7,
    "dflash_hf.patching": 7,
    "dflash_hf.generation.generate": 7,
    "dflash_hf.generation.iterate": 7,
    "dflash_hf.generation.row_requests": 7,
    "dflash_hf.generation.row_answers": 7,
    "dflash_hf.generation.running_batch": 7,
    "dflash_hf.generation.batches": 7,
    "dflash_hf.generation.tune": 7,
    "dflash_hf.bench": 7,
    "dflash_hf.chat": 7,
    "dflash_hf.doctor": 7,
    "dflash_hf.serve": 7,
    "dflash_hf.__main__": 8,
    "dflash_hf.cli": 8,
    "demos": 8,
    "benchmarks": 8,
}
KERNEL_BENCHMARKS = ("benchmarks.harness.kernel_cases", "benchmarks.harness.sweep")
MAX_FILE_LINES = 600
MAX_FUNCTION_STATEMENTS = 45  # not lines: a limit of lines has statements folded together
MAX_JIT_LINES = 140
# The folders that a decode step goes through.
CORE = (
    "dflash_hf.generation",
    "dflash_hf.target_model",
    "dflash_hf.cache",
    "dflash_hf.draft_model.gemma4",
    "dflash_hf.draft_model.laguna",
    "dflash_hf.draft_model.layers",
    "dflash_hf.modeling_dflash",
)
OPTIONAL_DEPENDENCIES = (
    "triton",
    "gradio",
    "datasets",
    "matplotlib",
    "PIL",
    "pandas",
    "math_verify",
    "lm_eval",
    "uvicorn",
)

# Modules that must not wait for the device -> their functions that may: they run once, before or after the loop, or
# where the host decides.
HOT_MODULES: dict[str, set[str]] = {
    "dflash_hf.block.attention": set(),
    "dflash_hf.cache.prefilled": {"__init__"},  # prompts go where the host says, once per run
    "dflash_hf.cache.ragged": set(),
    "dflash_hf.cache.rows": set(),
    "dflash_hf.draft_model.dflash2": set(),
    "dflash_hf.draft_model.gemma4": set(),
    "dflash_hf.draft_model.laguna": set(),
    "dflash_hf.draft_model.layers": set(),
    "dflash_hf.modeling_dflash": set(),
    "dflash_hf.cache.context": set(),
    "dflash_hf.ops": set(),
    "dflash_hf.joint_products": set(),
    "dflash_hf.block.positions": set(),
    "dflash_hf.block.tree": {"is_in_place"},  # asked only where nothing has to be waited for
    "dflash_hf.cache.recurrence": set(),
    "dflash_hf.cache.recurrent": set(),
    "dflash_hf.target_model.fast_by_kernels": set(),
    "dflash_hf.target_model.fast_layers": set(),
    "dflash_hf.target_model.fast_on_cpu": set(),
    "dflash_hf.target_model.reentry": set(),
    "dflash_hf.undo": set(),
    "dflash_hf.target_model.hidden_states": set(),
    "dflash_hf.target_model.parts": set(),
    "dflash_hf.generation.accept": {"_choose_tokens", "stop_by_criteria"},
    "dflash_hf.generation.choose": set(),
    "dflash_hf.generation.synchronized_rows": {"_stream"},
    "dflash_hf.generation.draw": set(),
    "dflash_hf.generation.sampling": {"at", "settings", "check_drawable"},
    "dflash_hf.generation.buffers": set(),
    "dflash_hf.generation.candidate_generator": set(),
    "dflash_hf.generation.float8": set(),
    "dflash_hf.generation.newest_context": set(),
    "dflash_hf.generation.row_rules": set(),
    "dflash_hf.generation.joining": set(),
    "dflash_hf.generation.places": {"run_captured"},
    "dflash_hf.generation.run": set(),
    "dflash_hf.generation.state": set(),
    "dflash_hf.generation.static_step": set(),
    "dflash_hf.generation.step": {
        "finish",
        "report",
        "take_report",
    },
}
# What moves when a row moves on, and the functions that may change it: the start of a run, and the commit.
ROW_COUNTS = {"anchor", "cursor", "lengths", "next_positions", "remaining"}
MOVES_ROWS = {"dflash_hf.generation.state": {"begin"}, "dflash_hf.generation.accept": {"commit"}}
# A stop lowers what a row may still generate, and the commit ends it there.
STOPS_ROWS = {
    "dflash_hf.generation.accept": {"stop_by_criteria"},
    "dflash_hf.generation.synchronized_rows": {"choose"},
}
HOST_READS = {"item", "tolist", "cpu", "numpy"}


def level_of(name: str) -> int | None:
    """The level of a module, or None where the table has none for it."""
    prefix = name
    while prefix not in LEVELS:
        prefix = prefix.rpartition(".")[0]
        if prefix in ("", "dflash_hf"):
            return None
    return LEVELS[prefix]


# ---- the rules: modules in, violations out


def imports_go_down(modules: list[Module]) -> list[str]:
    """A module imports only its own level and lower ones, and every module has a level."""
    names = {module.name for module in modules}
    wrong = [
        f"{name}: has no level; give it one in LEVELS"
        for name in sorted(names)
        if level_of(name) is None
    ]
    for module in modules:
        own = level_of(module.name)
        for node, target in imported_modules(module, names):
            theirs = level_of(target)
            if own is not None and theirs is not None and theirs > own:
                wrong.append(module.at(node, f"level {own} imports {target} of level {theirs}"))
    return wrong


def no_import_cycles(modules: list[Module]) -> list[str]:
    """No chain of imports comes back to where it began."""
    try:
        graphlib.TopologicalSorter(import_graph(modules)).prepare()
    except graphlib.CycleError as error:
        return ["import cycle: " + " -> ".join(reversed(error.args[1]))]
    return []


def training_never_reaches_generation(modules: list[Module]) -> list[str]:
    """Training and decoding meet in the model and the taps only, by whatever chain of imports."""
    graph, wrong = import_graph(modules), []
    for start in sorted(name for name in graph if f"{name}.".startswith("dflash_hf.training.")):
        seen, waiting = set[str](), [start]
        while waiting:
            name = waiting.pop()
            if f"{name}.".startswith("dflash_hf.generation."):
                wrong.append(f"{start}: reaches {name}")
            elif name not in seen:
                seen.add(name)
                waiting.extend(graph[name])
    return wrong


def kernels_only_through_ops(modules: list[Module]) -> list[str]:
    """`dflash_kernels` is imported by `dflash_hf.ops` alone, and imports neither us nor Transformers.

    The benchmark that compares kernels with their references imports both.
    """
    wrong: list[str] = []
    for module in modules:
        inside = f"{module.name}.".startswith("dflash_kernels.")
        for node, target in imports(module):
            top = target.partition(".")[0]
            if (
                top == "dflash_kernels"
                and not inside
                and module.name not in ("dflash_hf.ops", *KERNEL_BENCHMARKS)
            ):
                wrong.append(module.at(node, "imports dflash_kernels; only dflash_hf.ops may"))
            if inside and top in ("dflash_hf", "transformers"):
                wrong.append(module.at(node, f"a kernel module imports {top}"))
    return wrong


def optional_dependencies_in_one_module(modules: list[Module]) -> list[str]:
    """Each optional dependency is imported by at most one module of the package, and one of the scripts beside it.

    The kernels are one package written in Triton, and count as one.
    """
    wrong: list[str] = []
    for dependency in OPTIONAL_DEPENDENCIES:
        importing = [
            m.name for m in modules if any(t.partition(".")[0] == dependency for _, t in imports(m))
        ]
        users = sorted(
            {"dflash_kernels" if n.startswith("dflash_kernels.") else n for n in importing}
        )
        scripts = [name for name in users if name.startswith(("demos.", "benchmarks."))]
        groups = (scripts, [name for name in users if name not in scripts])
        wrong += [
            f"{dependency} is imported by {', '.join(group)}; keep one and import from it"
            for group in groups
            if len(group) > 1
        ]
    return wrong


def files_and_functions_are_short(modules: list[Module]) -> list[str]:
    """Files and jit kernels keep to their number of lines, functions to theirs of statements."""
    wrong: list[str] = []
    for module in modules:
        if (lines := len(module.text.splitlines())) > MAX_FILE_LINES:
            wrong.append(f"{module.name}: {lines} lines, at most {MAX_FILE_LINES}")
        for function in functions(module):
            assert function.end_lineno is not None
            lines = function.end_lineno - function.lineno + 1
            if is_jit(function) and lines > MAX_JIT_LINES:
                wrong.append(
                    module.at(
                        function, f"{function.name} has {lines} lines, at most {MAX_JIT_LINES}"
                    )
                )
            num = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
            if not is_jit(function) and num > MAX_FUNCTION_STATEMENTS:
                said = f"{function.name} has {num} statements, at most {MAX_FUNCTION_STATEMENTS}"
                wrong.append(module.at(function, said))
    return wrong


def statements_are_plain(modules: list[Module]) -> list[str]:
    """The package assigns one value a line, and nests no conditional expressions; the core assigns in none."""
    wrong: list[str] = []
    for module in modules:
        if not f"{module.name}.".startswith("dflash_hf."):
            continue
        for node in nodes(module):
            if isinstance(node, ast.Assign):
                is_parallel = isinstance(node.targets[0], ast.Tuple) and isinstance(
                    node.value, ast.Tuple
                )
                if is_parallel or len(node.targets) > 1:
                    wrong.append(module.at(node, "several assignments at once; write one a line"))
            inner = list(ast.walk(node))[1:] if isinstance(node, ast.IfExp) else []
            if any(isinstance(other, ast.IfExp) for other in inner):
                wrong.append(
                    module.at(node, "a conditional expression within another; use if and elif")
                )
            if isinstance(node, ast.NamedExpr) and module.name.startswith(CORE):
                wrong.append(
                    module.at(
                        node, "an assignment within an expression; write it on a line of its own"
                    )
                )
    return wrong


def public_names_are_documented(modules: list[Module]) -> list[str]:
    """Modules, public classes, public functions and methods, and every jit kernel have a docstring."""
    wrong: list[str] = []

    def visit(module: Module, owner: ast.Module | ast.ClassDef) -> None:
        for node in owner.body:
            if not isinstance(node, Function | ast.ClassDef):
                continue
            jit = isinstance(node, Function) and is_jit(node)
            exempt = isinstance(node, Function) and decorated(node, "overload", "setter")
            if (
                (jit or not node.name.startswith("_"))
                and not exempt
                and not ast.get_docstring(node)
            ):
                wrong.append(module.at(node, f"{node.name} has no docstring"))
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                visit(module, node)

    for module in modules:
        if module.text.strip() and not ast.get_docstring(module.tree):
            wrong.append(f"{module.name}:1: the module has no docstring")
        visit(module, module.tree)
    return wrong


def functions_are_annotated(modules: list[Module]) -> list[str]:
    """Every function annotates all it takes and what it returns; jit kernels are Triton's own language."""
    wrong: list[str] = []
    for module in modules:
        methods = {id(f) for c in nodes(module) if isinstance(c, ast.ClassDef) for f in c.body}
        for function in functions(module):
            if is_jit(function):
                continue
            takes = function.args.posonlyargs + function.args.args
            if id(function) in methods and not decorated(function, "staticmethod"):
                takes = takes[1:]
            takes += [*function.args.kwonlyargs, function.args.vararg, function.args.kwarg]
            missing = [arg.arg for arg in takes if arg is not None and arg.annotation is None]
            missing += [] if function.returns is not None else ["return"]
            if missing:
                wrong.append(
                    module.at(function, f"{function.name} does not annotate {', '.join(missing)}")
                )
    return wrong


def no_print_in_the_package(modules: list[Module]) -> list[str]:
    """The package logs, or echoes in the CLI; it never prints."""
    return [
        module.at(node, "print(...) in the package")
        for module in modules
        if module.name.startswith(("dflash_hf", "dflash_kernels"))
        for node in nodes(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def hot_path_never_reads_on_the_host(modules: list[Module]) -> list[str]:
    """What runs at every decode step calls nothing that waits for the device."""
    wrong: list[str] = []

    def visit(module: Module, node: ast.AST) -> None:
        if isinstance(node, Function) and node.name in HOT_MODULES[module.name]:
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            to_cpu = node.func.attr == "to" and any(
                isinstance(arg, ast.Constant) and arg.value == "cpu"
                for arg in (*node.args, *(k.value for k in node.keywords))
            )
            if node.func.attr in HOST_READS or to_cpu:
                wrong.append(
                    module.at(node, f".{node.func.attr}() waits for the device in a hot module")
                )
        for child in ast.iter_child_nodes(node):
            visit(module, child)

    for module in modules:
        if module.name in HOT_MODULES:
            visit(module, module.tree)
    return wrong


def rows_move_on_in_one_place(modules: list[Module]) -> list[str]:
    """Only the commit changes how far a row has come, whatever has decided it."""
    wrong: list[str] = []

    def counts_in(node: ast.expr) -> set[str]:
        if isinstance(node, ast.Tuple | ast.List):
            return set().union(*map(counts_in, node.elts))
        while isinstance(node, ast.Subscript):
            node = node.value
        return {node.attr} & ROW_COUNTS if isinstance(node, ast.Attribute) else set()

    def changed_by(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Assign):
            return set().union(*map(counts_in, node.targets))
        if isinstance(node, ast.AugAssign):
            return counts_in(node.target)
        if not isinstance(node, ast.Call):
            return set()
        by_commit = {"positions_BP", *(f"{n}_B" for n in ROW_COUNTS)} & {
            keyword.arg for keyword in node.keywords
        }
        in_place = isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")
        return by_commit | (counts_in(node.func.value) if in_place else set())

    def visit(module: Module, node: ast.AST, functions: set[str]) -> None:
        if isinstance(node, Function):
            functions = functions | {node.name}
        may_move = functions & MOVES_ROWS.get(module.name, set())
        may_stop = functions & STOPS_ROWS.get(module.name, set())
        changed = changed_by(node)
        if changed and not may_move and not (changed == {"remaining"} and may_stop):
            wrong.append(
                module.at(node, f"changes {', '.join(sorted(changed))}; let `accept.commit` do it")
            )
        for child in ast.iter_child_nodes(node):
            visit(module, child, functions)

    for module in modules:
        if module.name.startswith("dflash_hf.generation."):
            visit(module, module.tree, set())
    return wrong


def exceptions_are_not_swallowed(modules: list[Module]) -> list[str]:
    """No bare `except`, and no `except Exception` that does nothing but go on."""
    wrong: list[str] = []
    for module in modules:
        for node in nodes(module):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or any(
                isinstance(n, ast.Name) and n.id in ("Exception", "BaseException")
                for n in ast.walk(node.type)
            )
            silent = all(
                isinstance(s, ast.Pass | ast.Return | ast.Continue | ast.Break)
                or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                for s in node.body
            )
            if node.type is None:
                wrong.append(module.at(node, "bare except"))
            elif broad and silent:
                wrong.append(module.at(node, "a broad except that swallows the error"))
    return wrong


Rule = Callable[[list[Module]], list[str]]
RULES: tuple[Rule, ...] = (
    imports_go_down,
    no_import_cycles,
    training_never_reaches_generation,
    kernels_only_through_ops,
    optional_dependencies_in_one_module,
    files_and_functions_are_short,
    statements_are_plain,
    public_names_are_documented,
    functions_are_annotated,
    no_print_in_the_package,
    hot_path_never_reads_on_the_host,
    rows_move_on_in_one_place,
    exceptions_are_not_swallowed,
)


# ---- the project


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_project(rule: Rule) -> None:
    modules = read_modules()
    assert "dflash_kernels" in {module.name for module in modules}, (
        "no source was found: the test looks elsewhere"
    )
    violations = rule(modules)
    assert not violations, "\n".join([f"{rule.__name__}:", *violations])


def test_level_and_hot_tables_name_real_things() -> None:
    defined = {m.name: {f.name for f in functions(m)} for m in read_modules()}
    gone = [name for name in HOT_MODULES if name not in defined]
    assert not gone, f"HOT_MODULES names modules that do not exist: {gone}"
    gone = [
        name
        for name in LEVELS
        if not any(f"{module}.".startswith(f"{name}.") for module in defined)
    ]
    assert not gone, f"LEVELS names modules that do not exist: {gone}"
    stale = [f"{m}.{f}" for m, cold in HOT_MODULES.items() for f in cold - defined[m]]
    assert not stale, f"HOT_MODULES exempts functions that do not exist: {stale}"


# ---- the rules themselves: each reports its bad sources, and only those

Sources = dict[str, str]
BAD: list[tuple[Rule, Sources, str]] = [
    (
        imports_go_down,
        {"dflash_hf.cache": "from .target_model import find", "dflash_hf.target_model": ""},
        "level 3 imports",
    ),
    (
        imports_go_down,
        {
            "dflash_hf.ops": "def f():\n    import dflash_hf.target_model.hidden_states",
            "dflash_hf.target_model.hidden_states": "",
        },
        "dflash_hf.ops:2",
    ),
    (
        imports_go_down,
        {"dflash_hf.training.loss": "import dflash_hf.cli.main", "dflash_hf.cli.main": ""},
        "level 6",
    ),
    (
        imports_go_down,
        {"dflash_hf.block.positions": "from dflash_hf import DFlashConfig", "dflash_hf": ""},
        "level 7",
    ),
    (
        imports_go_down,
        {
            "dflash_hf.chat.model": "from dflash_hf.cli.pair import about",
            "dflash_hf.cli.pair": "",
        },
        "level 7 imports",
    ),
    (imports_go_down, {"dflash_hf.utils": ""}, "has no level"),
    (
        no_import_cycles,
        {
            "dflash_hf.ops": "from .block import attention",
            "dflash_hf.block.attention": "from ..ops import f",
        },
        "cycle",
    ),
    (
        no_import_cycles,
        {
            "demos.a": "import demos.b",
            "demos.b": "from demos.c import x",
            "demos.c": "def f():\n    import demos.a",
        },
        "demos.a -> demos.b -> demos.c",
    ),
    (
        training_never_reaches_generation,
        {
            "dflash_hf.training.trainer": "from ..pair.metrics import mean",
            "dflash_hf.pair.metrics": "from dflash_hf.generation import stats",
            "dflash_hf.generation.stats": "",
        },
        "dflash_hf.training.trainer: reaches dflash_hf.generation.stats",
    ),
    (
        kernels_only_through_ops,
        {"dflash_hf.block.attention": "from dflash_kernels import ragged"},
        "only dflash_hf.ops may",
    ),
    (
        kernels_only_through_ops,
        {"dflash_kernels.a": "import transformers.cache_utils"},
        "imports transformers",
    ),
    (
        optional_dependencies_in_one_module,
        {"demos.a": "import PIL.Image", "demos.b": "from PIL import Image"},
        "PIL",
    ),
    (
        optional_dependencies_in_one_module,
        {
            "dflash_kernels.a": "import triton",
            "dflash_kernels.b": "import triton",
            "dflash_hf.ops": "import triton",
        },
        "triton is imported by dflash_hf.ops, dflash_kernels",
    ),
    (
        optional_dependencies_in_one_module,
        {"dflash_hf.a": "import PIL", "dflash_hf.b": "import PIL"},
        "PIL is imported",
    ),
    (files_and_functions_are_short, {"m": "\n" * 601}, "601 lines, at most 600"),
    (
        files_and_functions_are_short,
        {"m": "def f():\n" + "    x = 1\n" * 46},
        "f has 46 statements, at most 45",
    ),
    (
        files_and_functions_are_short,
        {"m": "@triton.jit\ndef f():\n" + "    x = 1\n" * 140},
        "141 lines, at most 140",
    ),
    (
        statements_are_plain,
        {"dflash_hf.bench.m": "a, b = 1, 2"},
        "dflash_hf.bench.m:1: several assignments",
    ),
    (statements_are_plain, {"dflash_hf.bench.m": "a = b = 1"}, "several assignments"),
    (
        statements_are_plain,
        {"dflash_hf.bench.m": "a = 1 if b else 2 if c else 3"},
        "a conditional expression within",
    ),
    (
        statements_are_plain,
        {"dflash_hf.cache.m": "if (a := f()):\n    pass"},
        "an assignment within an expression",
    ),
    (public_names_are_documented, {"m": "x = 1"}, "the module has no docstring"),
    (public_names_are_documented, {"m": '"""M."""\ndef f(): ...'}, "f has no docstring"),
    (
        public_names_are_documented,
        {"m": '"""M."""\nclass C:\n    """C."""\n    def f(self): ...'},
        "f has no docstring",
    ),
    (
        public_names_are_documented,
        {"m": '"""M."""\n@triton.jit\ndef _kernel(): ...'},
        "_kernel has no docstring",
    ),
    (functions_are_annotated, {"m": "def f(a: int, *b, c=1): ..."}, "c, b, return"),
    (
        functions_are_annotated,
        {"m": "class C:\n    def f(self, a) -> None: ..."},
        "f does not annotate a",
    ),
    (
        functions_are_annotated,
        {"m": "def f() -> None:\n    def g(x): ..."},
        "g does not annotate x, return",
    ),
    (
        no_print_in_the_package,
        {"dflash_hf.target_model": "def f():\n    print(1)"},
        "dflash_hf.target_model:2",
    ),
    (
        hot_path_never_reads_on_the_host,
        {"dflash_hf.generation.step": "def f(x):\n    return x.item()"},
        ".item()",
    ),
    (
        hot_path_never_reads_on_the_host,
        {"dflash_hf.cache.ragged": "class C:\n    def f(x): return x.to('cpu')"},
        ".to()",
    ),
    (
        hot_path_never_reads_on_the_host,
        {"dflash_hf.block.attention": "y = x.sum().tolist()"},
        ".tolist()",
    ),
    (
        rows_move_on_in_one_place,
        {"dflash_hf.generation.loop": "def f(s):\n    s.lengths += 1"},
        "changes lengths",
    ),
    (rows_move_on_in_one_place, {"dflash_hf.generation.loop": "s.cursor[0] = 1"}, "changes cursor"),
    (
        rows_move_on_in_one_place,
        {"dflash_hf.generation.run": "s.anchor.copy_(x)"},
        "changes anchor",
    ),
    (
        rows_move_on_in_one_place,
        {"dflash_hf.generation.accept": "def f():\n    g(cursor_B=c)"},
        "changes cursor_B",
    ),
    (
        rows_move_on_in_one_place,
        {"dflash_hf.generation.accept": "def decide(s):\n    s.lengths[0] = 1"},
        "lengths",
    ),
    (exceptions_are_not_swallowed, {"m": "try:\n    f()\nexcept:\n    raise"}, "bare except"),
    (
        exceptions_are_not_swallowed,
        {"m": "try:\n    f()\nexcept (OSError, Exception):\n    pass"},
        "swallows",
    ),
]
GOOD: Sources = {
    "dflash_hf": '"""The API."""\nfrom .generation.loop import decode\nfrom .integration import enable',
    "dflash_hf.patching": '"""The shim."""\nfrom .generation import loop\ndef enable() -> None:\n    """Do it."""',
    "dflash_hf.generation": '"""The loop\'s package."""',
    "dflash_hf.generation.loop": '"""The loop."""\nfrom ..ops import f\nfrom .state import State\nn = x.item()',
    "dflash_hf.generation.state": '"""The state."""\nclass _P:\n    def f(self, a: int) -> None: ...',
    "dflash_hf.ops": '"""Ops."""\nimport dflash_kernels\nfrom .attention import g\nx.to(device=0)',
    "dflash_hf.block.attention": '"""M."""\nclass C:\n    """C."""\n    @staticmethod\n    def _f(a: int) -> C: ...',
    "dflash_hf.training": '"""Training."""\ntry:\n    f()\nexcept OSError:\n    pass',
    "dflash_hf.cli.main": '"""CLI."""\nimport dflash_hf\ntry:\n    f()\nexcept Exception as e:\n    raise E from e',
    "dflash_kernels": '"""Kernels."""\nimport triton\n@triton.jit\ndef k(a, N):\n    """k = a"""',
    "demos.app": '"""The demo."""\nimport gradio\nfrom dflash_hf import enable\nprint(1)',
}


@pytest.mark.parametrize(
    ("rule", "sources", "report"), BAD, ids=[f"{row[0].__name__}-{i}" for i, row in enumerate(BAD)]
)
def test_rule_reports_bad_source(rule: Rule, sources: Sources, report: str) -> None:
    violations = rule([Module.parse(name, text) for name, text in sources.items()])
    assert len(violations) == 1, violations
    assert report in violations[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_good_source_and_has_a_bad_one(rule: Rule) -> None:
    packages = {"dflash_hf", "dflash_hf.generation", "dflash_kernels"}
    assert rule([Module.parse(name, text, name in packages) for name, text in GOOD.items()]) == []
    assert rule in {row[0] for row in BAD}, "add a source that this rule must report"
