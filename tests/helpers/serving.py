"""vLLM's and SGLang's own code for a draft's config and weight names, without what they need a GPU for.

The modules that read a config and name weights are theirs, from an unpacked wheel; whatever else these import is stood
in for: a layer by a module with the parameters that theirs has, anything else by an object that does nothing. A draft
is loaded by their `load_weights`, and what arrives in each parameter can be compared.

    pip install --no-deps --target build/engines vllm sglang
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

ENGINES = Path(
    os.environ.get("DFLASH_ENGINES", Path(__file__).resolve().parents[2] / "build" / "engines")
)
# The modules that are theirs; all others of the two packages are stood in for.
REAL = {
    "vllm": (
        "vllm.model_executor.models.qwen2",
        "vllm.model_executor.models.qwen3",
        "vllm.model_executor.models.qwen3_dflash",
        "vllm.model_executor.models.qwen3_dflash2",
        "vllm.model_executor.models.utils",
        "vllm.transformers_utils.configs.eagle",
        "vllm.transformers_utils.configs.speculators.algos",
        "vllm.transformers_utils.configs.speculators.base",
        "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils",
    ),
    "sglang": ("sglang.srt.models.dflash", "sglang.srt.speculative.dflash_utils"),
}


def installed(name: str) -> bool:
    """Whether an engine's wheel has been unpacked where the tests look."""
    return (ENGINES / name).is_dir()


class _Kind(type):
    """The class of what stands in: any attribute of it is there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Linear(nn.Module):
    """A linear layer of an engine: one weight, into which parts are written by their names."""

    def __init__(
        self, num_out: int, num_in: int, bias: bool, rows: dict[Any, slice] | None = None
    ) -> None:
        super().__init__()
        self.input_size = self.in_features = num_in
        self.weight = nn.Parameter(torch.full((num_out, num_in), torch.nan), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.full((num_out,), torch.nan), requires_grad=False) if bias else None
        )
        self.quant_method = None
        for parameter in self.parameters():
            parameter.weight_loader = self._loader(rows or {})  # type: ignore[attr-defined]

    @staticmethod
    def _loader(rows: dict[Any, slice]) -> Callable[..., None]:
        def load(parameter: nn.Parameter, loaded: Tensor, shard: Any = None) -> None:
            shard = getattr(loaded, "shard_id", shard)  # vLLM's way of saying which part it is
            place = parameter.data if shard is None else parameter.data[rows[shard]]
            assert place.shape == loaded.shape, (shard, place.shape, loaded.shape)
            place.copy_(loaded)

        return load


class _QKV(_Linear):
    def __init__(
        self,
        hidden_size: int,
        head_size: int | None = None,
        total_num_heads: int = 0,
        total_num_kv_heads: int = 0,
        bias: bool = False,
        **rest: Any,
    ) -> None:
        size = head_size or rest["head_dim"]
        query, key = total_num_heads * size, total_num_kv_heads * size
        rows = {
            "q": slice(0, query),
            "k": slice(query, query + key),
            "v": slice(query + key, query + 2 * key),
        }
        super().__init__(query + 2 * key, hidden_size, bias, rows)


class _Merged(_Linear):
    def __init__(
        self, input_size: int, output_sizes: Sequence[int], bias: bool = False, **rest: Any
    ) -> None:
        ends = [sum(output_sizes[:at]) for at in range(len(output_sizes) + 1)]
        rows = {at: slice(ends[at], ends[at + 1]) for at in range(len(output_sizes))}
        super().__init__(ends[-1], input_size, bias, rows)


class _Plain(_Linear):
    def __init__(self, input_size: int, output_size: int, bias: bool = False, **rest: Any) -> None:
        super().__init__(output_size, input_size, bias)


class _Table(_Linear):
    def __init__(self, num_embeddings: int, embedding_dim: int, **rest: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, False)


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = (
            nn.Parameter(torch.full((size,), torch.nan), requires_grad=False),
            eps,
        )


class _Empty(nn.Module):
    """A module without parameters; it keeps what it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.given = kwargs


def _decorator(*args: Any, **kwargs: Any) -> Any:
    return (
        args[0] if len(args) == 1 and not kwargs and callable(args[0]) else lambda wrapped: wrapped
    )


def _copy(parameter: nn.Parameter, loaded: Tensor) -> None:
    assert parameter.shape == loaded.shape, (parameter.shape, loaded.shape)
    parameter.data.copy_(loaded)


def _rope(head_size: int, *args: Any, **kwargs: Any) -> Any:
    is_neox = kwargs.get("is_neox_style", True)
    return SimpleNamespace(
        head_size=head_size, is_neox_style=is_neox, cos_sin_cache=None, rotary_dim=head_size
    )


CURRENT = SimpleNamespace(vllm=None)
STAND_INS: dict[str, Any] = {
    "Attention": _Empty,
    "RadixAttention": _Empty,
    "LogitsProcessor": _Empty,
    "SiluAndMul": _Empty,
    "RMSNorm": _Norm,
    "GemmaRMSNorm": _Norm,
    "QKVParallelLinear": _QKV,
    "MergedColumnParallelLinear": _Merged,
    "ReplicatedLinear": _Plain,
    "RowParallelLinear": _Plain,
    "ParallelLMHead": _Table,
    "VocabParallelEmbedding": _Table,
    "current_platform": SimpleNamespace(is_rocm=lambda: False),
    "default_weight_loader": _copy,
    "direct_register_custom_op": lambda *args, **kwargs: None,
    "get_compiler_backend": lambda: "eager",
    "get_current_vllm_config": lambda: CURRENT.vllm,
    "get_hf_file_bytes": lambda *args: None,
    "get_parallel": lambda: SimpleNamespace(tp_size=1),
    "get_rope": _rope,
    "get_rope_config": lambda config: (config.rope_parameters["rope_theta"], None),
    "get_tensor_model_parallel_rank": lambda: 0,
    "get_tensor_model_parallel_world_size": lambda: 1,
    "init_logger": logging.getLogger,
    "is_npu": lambda: False,
    "set_default_rope_theta": lambda config, default_theta: None,
    "support_quantized_model_reload_from_hp_weights": _decorator,
    "support_torch_compile": _decorator,
    "supports_any_eagle": lambda model: False,
    "without_trust_remote_code": lambda kwargs: kwargs,
}


class _StandIn(types.ModuleType):
    """A module whose every name is there."""

    __path__: list[str] = []  # noqa: RUF012  (a package, so that its modules are asked for)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = (
            STAND_INS[name]
            if name in STAND_INS
            else _Kind(name, (), {"__init__": lambda self, *a, **k: None})
        )
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        engine = fullname.partition(".")[0]
        if engine not in REAL:
            return None
        if fullname in REAL[engine]:
            file = ENGINES / (fullname.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Makes their modules importable; afterwards nothing of them is left."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in REAL]:
            del sys.modules[name]


def function_of(file: str, name: str, **names: Any) -> Any:
    """A function (or static method) of a file of theirs that cannot be imported, with what it calls given by name."""
    tree = ast.parse((ENGINES / file).read_text(encoding="utf-8"))
    (found,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    found.decorator_list = []
    module = ast.Module(
        body=[ast.parse("from __future__ import annotations").body[0], found], type_ignores=[]
    )
    space: dict[str, Any] = dict(names)
    exec(compile(ast.fix_missing_locations(module), file, "exec"), space)
    return space[name]


def vllm_draft(
    folder: Path, target: Any, written: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Builds vLLM's model of a draft from a folder as vLLM would, and loads its weights.

    Returns:
        `tuple`: The model, and the speculative config (`method`, `num_speculative_tokens`) that a speculators folder
        brings, empty for others.
    """
    from transformers import AutoConfig

    speculators = importlib.import_module(
        "vllm.transformers_utils.configs.speculators.base"
    ).SpeculatorsConfig
    eagle = importlib.import_module("vllm.transformers_utils.configs.eagle").EAGLEConfig
    speculative: dict[str, Any] = {}
    if "speculators_model_type" in written:
        hf_config = speculators.from_pretrained(folder)
        speculative = speculators.extract_vllm_speculative_config(written)
    else:
        override = function_of("vllm/config/speculative.py", "hf_config_override")
        hf_config = eagle(
            override(AutoConfig.from_pretrained(folder)), method="dflash", model_type="eagle"
        )
    module = importlib.import_module("vllm.model_executor.models.qwen3_dflash")
    module.get_draft_quant_config = lambda config: None
    module.map_draft_quant_config = lambda *args: None
    text = target.config.get_text_config()
    CURRENT.vllm = SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=SimpleNamespace(
                hf_config=hf_config, model=str(folder), revision=None
            ),
            method="dflash",
        ),
        model_config=SimpleNamespace(
            dtype=torch.float32,
            get_total_num_hidden_layers=lambda: text.num_hidden_layers,
            get_vocab_size=lambda: text.vocab_size,
        ),
        cache_config=None,
        use_v2_model_runner=True,
    )
    registry = (ENGINES / "vllm/model_executor/models/registry.py").read_text(encoding="utf-8")
    (architecture,) = hf_config.architectures
    assert f'"{architecture}": ("qwen3_dflash", "DFlashQwen3ForCausalLM")' in registry, architecture
    return module.DFlashQwen3ForCausalLM(vllm_config=CURRENT.vllm), speculative


def sglang_draft(folder: Path) -> nn.Module:
    """Builds SGLang's model of a draft from a folder."""
    from transformers import AutoConfig

    module = importlib.import_module("sglang.srt.models.dflash")
    config = AutoConfig.from_pretrained(folder)
    (architecture,) = config.architectures
    model_class = next(found for found in module.EntryClass if found.__name__ == architecture)
    return model_class(config)
