"""The step that a CUDA graph captures, at published shapes, on a pretended H200: it runs, needs the host nowhere and
writes all that it must. What this cannot see is listed in `helpers/pretended_gpu.py`.

One target has all its layers, the others enough to have every kind of layer beside one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness.shapes import SHAPES
from harness.shapes import target_config as config_of
from torch import Tensor
from transformers import (
    BambaConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LogitsProcessorList,
    MiniCPM3Config,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_hf import DFlashConfig, ops
from dflash_hf.cache.ragged import RaggedLayer
from dflash_hf.generation import static_step as static_module
from dflash_hf.generation import step as step_module
from dflash_hf.generation.checks import check_capturable, check_float8
from dflash_hf.generation.cuda_graph import why_not
from dflash_hf.generation.float8 import why_not as why_not_float8
from dflash_hf.generation.host_reads import HostReadError
from dflash_hf.generation.joining import RowSettings
from dflash_hf.generation.places import Places
from dflash_hf.generation.run import Run
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.target_model.parts import Target, find_target
from helpers.kernel_checks import TREES
from helpers.pretended_gpu import (
    LIMIT,
    PROMPT,
    Step,
    begin,
    build_draft,
    build_target,
    captured_step,
)

BLOCK = 16
LINEAR, FULL = "linear_attention", "full_attention"


def published(name: str, depth: int | None = None) -> PreTrainedConfig:
    """A row of the benchmarks' table, with fewer layers if so wanted."""
    config = config_of(SHAPES[name])
    if depth is not None:
        text = config.get_text_config()
        text.num_hidden_layers = depth
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:depth]
    return config


def _lfm2() -> Lfm2Config:
    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_hidden_layers": 4,
    }
    return Lfm2Config(**sizes, layer_types=["conv", "conv", FULL, "conv"])


def _granite() -> GraniteMoeHybridConfig:
    """Granite-4.0-H-Tiny."""
    sizes: dict[str, Any] = {
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
    }
    sizes |= {
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 100352,
        "num_local_experts": 64,
    }
    sizes |= {
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    }
    return GraniteMoeHybridConfig(**sizes, num_hidden_layers=3, layer_types=[LINEAR, LINEAR, FULL])


TARGETS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-8b": lambda: published("qwen3-8b"),
    "qwen3-8b-short": lambda: published("qwen3-8b", 2),
    "qwen3-30b-a3b": lambda: published("qwen3-30b-a3b", 2),
    # Its DeepStack adds to the first three layers.
    "qwen3-vl-8b": lambda: published("qwen3-vl-8b", 5),
    "llama-3.1-8b": lambda: published("llama-3.1-8b", 3),
    "gpt-oss-20b": lambda: GptOssConfig(num_hidden_layers=3, num_local_experts=32),
    "qwen3.5-9b": lambda: Qwen3_5TextConfig(num_hidden_layers=4),
    "qwen3.5-35b-a3b": lambda: Qwen3_5MoeTextConfig(num_hidden_layers=4),
    "qwen3.5-vl": lambda: Qwen3_5Config(
        text_config={"num_hidden_layers": 4}, vision_config={"depth": 1}
    ),
    "qwen3.5-vl-moe": lambda: Qwen3_5MoeConfig(
        text_config={"num_hidden_layers": 4}, vision_config={"depth": 1}
    ),
    "qwen3-next-80b-a3b": lambda: Qwen3NextConfig(num_hidden_layers=4),
    "lfm2-1.2b": _lfm2,
    "lfm2-8b-a1b": lambda: Lfm2MoeConfig(
        num_hidden_layers=4, layer_types=["conv", "conv", FULL, "conv"]
    ),
    "bamba-9b": lambda: BambaConfig(num_hidden_layers=4, attn_layer_indices=[2]),
    "granite-4.0-h-tiny": _granite,
    "minicpm3-4b": lambda: MiniCPM3Config(num_hidden_layers=3),
}
# All of whose norms, and what comes before whose attention, kernels compute.
FUSED = ("qwen3", "qwen3_moe", "qwen3_vl_text", "llama")
WARPERS: dict[str, Callable[[], list[Any]]] = {
    "greedy": list,
    "plain": list,
    "temperature": lambda: [TemperatureLogitsWarper(0.7)],
    "top-k": lambda: [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)],
    "top-p": lambda: [TopPLogitsWarper(0.9)],
    "top-k, top-p": lambda: [
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.95),
    ],
    "repetition": lambda: [RepetitionPenaltyLogitsProcessor(1.2)],
}
DFLASH2: dict[str, Any] = {
    "conv_kernel_size": 4,
    "conv_group_size": 64,
    "selector_rank": 256,
    "selector_top_k": 64,
}
GEMMA4_LAYERS: dict[str, Any] = {
    "layer_family": "gemma4",
    "input_embedding_scale": 64.0,
    "rope_parameters": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}


FIRST_CHANNELS: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step: of which target, and what is asked of it."""

    target: str
    warpers: str = "greedy"
    proposal: str = "argmax"
    batch: int = 1
    width: int | None = None
    nodes: int | None = None
    experts: str | None = None
    kernels: bool | None = None
    draft_dtype: str | None = None
    draft: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Says what is not the default."""
        said = [self.target, self.warpers, *([] if self.warpers == "greedy" else [self.proposal])]
        said += [f"batch {self.batch}"] if self.batch > 1 else []
        said += [f"width {self.width}"] if self.width else []
        said += [f"tree of {self.nodes}"] if self.nodes else []
        said += [self.experts] if self.experts else []
        said += ["in torch"] if self.kernels is False else []
        said += [self.draft_dtype] if self.draft_dtype else []
        return ", ".join(
            [*said, *(["dflash 2"] if "selector_rank" in self.draft else list(self.draft))]
        )


SHORT = "qwen3-8b-short"
CASES = [
    # Every published shape.
    *(
        Case(target=name)
        for name in ("qwen3-8b", "qwen3-30b-a3b", "qwen3-vl-8b", "gpt-oss-20b", "qwen3.5-9b")
    ),
    # Every rule and warper, with rows and widths of several kinds, by kernels and by torch.
    Case(target="llama-3.1-8b", batch=4, width=7),
    Case(target=SHORT, kernels=False),
    Case(target=SHORT, batch=4, width=7, kernels=False),
    Case(target=SHORT, warpers="plain", proposal="argmax"),
    Case(target=SHORT, warpers="plain", proposal="shared_noise", batch=4),
    Case(target=SHORT, warpers="plain", proposal="sample", width=5),
    Case(target=SHORT, warpers="temperature", proposal="shared_noise", kernels=False),
    Case(target=SHORT, warpers="top-k", proposal="argmax", batch=4),
    Case(target=SHORT, warpers="top-k", proposal="sample", kernels=False),
    Case(target=SHORT, warpers="top-p", proposal="shared_noise"),
    Case(target=SHORT, warpers="top-p", proposal="sample", batch=4, width=5),
    Case(target=SHORT, warpers="top-k, top-p", proposal="argmax", kernels=False),
    Case(target=SHORT, warpers="top-k, top-p", proposal="shared_noise", batch=4, width=9),
    Case(target=SHORT, warpers="top-k, top-p", proposal="sample"),
    # The host decides between two steps; both forwards alone are captured.
    Case(target=SHORT, warpers="repetition"),
    Case(target=SHORT, warpers="repetition", proposal="shared_noise", batch=4, kernels=False),
    # Kinds of drafts.
    Case(target=SHORT, draft=DFLASH2),
    Case(target=SHORT, warpers="top-p", proposal="shared_noise", batch=4, draft=DFLASH2),
    Case(target=SHORT, warpers="top-k", proposal="sample", width=5, draft=DFLASH2, kernels=False),
    Case(target=SHORT, draft={"sample_from_anchor": True}),
    Case(target=SHORT, draft={"layer_family": "laguna"}),
    Case(target=SHORT, draft={"attention_sink_bias": True, "attention_value_scale": 0.612}),
    Case(target=SHORT, batch=4, width=7, draft=FIRST_CHANNELS),
    Case(target=SHORT, draft=GEMMA4_LAYERS),
    Case(target=SHORT, batch=4, width=7, draft={**GEMMA4_LAYERS, "keys_are_values": True}),
    Case(target=SHORT, draft=GEMMA4_LAYERS, draft_dtype="float8_e4m3fn"),
    Case(target=SHORT, draft={"sliding_window": 512, "layer_types": ["sliding_attention", FULL]}),
    # Drafting in FP8.
    Case(target=SHORT, draft_dtype="float8_e4m3fn"),
    Case(target=SHORT, batch=4, width=7, kernels=False, draft_dtype="float8_e4m3fn"),
    Case(
        target=SHORT, warpers="top-k", proposal="sample", draft=DFLASH2, draft_dtype="float8_e4m3fn"
    ),
    # Experts.
    Case(target="qwen3-30b-a3b", experts="batched_mm", batch=4),
    Case(target="qwen3-30b-a3b", experts="grouped_mm", batch=4, width=7, kernels=False),
    Case(target="gpt-oss-20b", experts="batched_mm", warpers="top-p", proposal="sample"),
    Case(target="gpt-oss-20b", experts="grouped_mm", batch=4, kernels=False),
    # Positions of several kinds.
    Case(target="qwen3.5-vl", batch=4),
    Case(target="qwen3.5-vl-moe", warpers="top-k", proposal="sample"),
    # Recurrent layers.
    Case(target="qwen3.5-35b-a3b", batch=4, width=7),
    Case(target="qwen3-next-80b-a3b", warpers="top-p", proposal="shared_noise"),
    Case(target="lfm2-1.2b", batch=4, kernels=False),
    Case(target="lfm2-8b-a1b", warpers="top-p", proposal="sample", width=7),
    Case(target="bamba-9b", warpers="top-k", proposal="sample", batch=4),
    Case(target="granite-4.0-h-tiny", width=7),
]


def run_of(case: Case) -> Run:
    """Builds the pair and begins the run."""
    config = TARGETS[case.target]()
    text = config.get_text_config()
    depth = text.num_hidden_layers
    sizes = {
        "hidden_size": text.hidden_size,
        "intermediate_size": 12288,
        "vocab_size": text.vocab_size,
    }
    # Of a target with all its layers the published number, else each kind of layer once.
    layers = 5 if depth > 8 else 2
    sizes |= {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": layers,
    }
    taps = sorted({1, depth // 2, depth - 1})
    own = DFlashConfig(
        **{**sizes, "max_position_embeddings": 40960, **case.draft},
        block_size=BLOCK,
        mask_token_id=text.vocab_size - 1,
        num_target_layers=depth,
        target_layer_ids=taps,
    )
    draft = build_draft(own)
    draft.generation_config.verify_width = case.width
    draft.generation_config.num_tree_nodes = case.nodes
    draft.generation_config.proposal = case.proposal  # pyright: ignore[reportAttributeAccessIssue]
    draft.generation_config.draft_dtype = case.draft_dtype  # pyright: ignore[reportAttributeAccessIssue]
    if case.draft_dtype:
        check_float8(draft)
    sampled = case.warpers not in ("greedy", "repetition")
    model = build_target(config, case.experts)
    return begin(model, draft, case.batch, WARPERS[case.warpers](), do_sample=sampled)


def check(run: Run, step: Step, uses_kernels: bool) -> None:
    """The step was the real one: every layer's attention ran, and everything was written."""
    config = run.generator.draft.config
    layers = config.num_hidden_layers
    # Of the draft: kernels norm as Qwen3 does.
    is_draft_fused = config.layer_family != "gemma4"
    # Other layers than Qwen3's, and those that turn a part of each head, write their context themselves, along with
    # the block.
    is_stacked = config.layer_family == "qwen3" and config.rotary_dim == config.head_dim
    attending = sum(isinstance(layer, RaggedLayer) for layer in run.cache.layers) + layers
    missing = [name for name, is_written in step.written.items() if not is_written]
    assert not missing
    if uses_kernels:
        assert step.num("block_attention") == attending
        depth = run.request.target.config.num_hidden_layers
        is_fused = run.request.target.config.model_type in FUSED
        assert step.num("::norm_rope_write") == layers * is_stacked + depth * is_fused
        # Of the draft those of the context and of the first layer's input; the others go with the sums before them.
        assert step.num("::rms_norm") >= 2 * is_draft_fused + is_fused
        assert step.num("::add_norm") == 2 * layers * is_draft_fused + 2 * depth * is_fused
        if is_fused and is_draft_fused:
            assert step.num("aten::rsqrt") == 0
        assert step.num("::context_kv") == is_stacked
        assert step.num("::accept_and_prepare") == step.decides
    else:
        assert not [name for name in step.calls if name.startswith("dflash")]
        assert step.num("aten::rsqrt") > 0
        assert step.num("scaled_dot_product") + step.num("_softmax") >= attending
    # Of the draft's layers, the context's projection and the head.
    num_products = 7 - config.keys_are_values
    num_rounded = 0
    if run.generator.draft.generation_config.draft_dtype:
        num_rounded = num_products * layers + 2
    assert step.num("_scaled_mm") == num_rounded
    # Projections of every layer, and both heads.
    assert step.num("mm") + step.num("linear") > 4 * attending


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_step_at_published_shapes_needs_no_host(case: Case) -> None:
    with ops.kernels(case.kernels):
        run = run_of(case)
        step = captured_step(run)
    assert step.decides == (case.warpers != "repetition")
    assert run.state.tokens.shape == (
        case.batch,
        case.width or BLOCK + ("sample_from_anchor" in case.draft),
    )
    check(run, step, case.kernels is not False)


@pytest.mark.parametrize(
    "case",
    [
        Case(target=SHORT, nodes=32),
        Case(target=SHORT, nodes=16, warpers="top-k", proposal="shared_noise", batch=4),
        Case(target=SHORT, nodes=16, draft=DFLASH2, batch=2),
        Case(target=SHORT, nodes=16, warpers="top-p", proposal="shared_noise", batch=2),
        Case(target=SHORT, nodes=8, warpers="top-k", draft=DFLASH2),
        Case(target="gpt-oss-20b", nodes=8, batch=4),
        Case(target="qwen3-vl-8b", nodes=16),
    ],
    ids=lambda case: case.id,
)
def test_a_tree_needs_no_host(case: Case) -> None:
    with ops.kernels(case.kernels):
        run = run_of(case)
        step = captured_step(run)
    assert run.state.tokens.shape == (case.batch, case.nodes)
    assert not [name for name, is_written in step.written.items() if not is_written]
    check(run, step, uses_kernels=True)
    # What a top-k leaves of the target's tokens is found as a tree's are.
    is_drawn_by_top_k = case.warpers == "top-k"
    wanted = {name: 1 + (is_drawn_by_top_k and name == "top_tokens") for name in TREES}
    assert {name: step.num(f"::{name}") for name in TREES} == wanted


@pytest.mark.parametrize(
    "case",
    [
        Case(target=SHORT),
        Case(target=SHORT, kernels=False),
        Case(target=SHORT, warpers="top-k, top-p", proposal="shared_noise"),
        Case(target=SHORT, warpers="top-p", nodes=16),
        Case(target="gpt-oss-20b"),
        Case(target="qwen3-vl-8b"),
        Case(target="qwen3.5-9b", warpers="top-k"),
    ],
    ids=lambda case: case.id,
)
@torch.no_grad()
def test_a_step_over_places_needs_no_host(case: Case) -> None:
    """Of a running batch: two rows, one place that was never taken, and one whose row has left."""
    with ops.kernels(case.kernels):
        first = run_of(case)
        seed = torch.zeros((), dtype=torch.long, device="cuda")
        row = RowSettings(first.request.processors, [1, 2], seed, PROMPT + LIMIT)
        greedy = RowSettings(BlockProcessors(LogitsProcessorList()), [3], None, PROMPT + LIMIT)
        places = Places(first, 4)
        left = places.add(first, greedy)
        for settings in (row, greedy):
            places.add(first, settings)
        places.free([left])
        is_there = [length > 0 for length in places.run.rows.reported.lengths]
        assert is_there == [False, True, True, False]
        addresses = [id(tensor) for tensor in places.buffers.owned()]
        step = captured_step(places.run)
    assert step.decides
    assert places.run.state.tokens.shape == (4, case.nodes or BLOCK)
    check(places.run, step, case.kernels is not False)
    assert [id(tensor) for tensor in places.buffers.owned()] == addresses


def test_without_kernels_no_captured_step_has_a_tree_by_default() -> None:
    """They are built on the host then."""
    for kernels in (None, False):
        with ops.kernels(kernels):
            has_trees = run_of(Case(target=SHORT)).state.nodes.numel() > 0
            assert has_trees == (kernels is not False)
    with ops.kernels(False), pytest.raises(HostReadError):
        captured_step(run_of(Case(target=SHORT, nodes=16)))


def test_fp8_is_for_devices_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = run_of(Case(target=SHORT, draft_dtype="float8_e4m3fn")).generator.draft
    for capability, refused in (
        ((8, 0), "8.0"),
        ((8, 6), "8.6"),
        ((8, 9), None),
        ((9, 0), None),
        ((12, 0), None),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None, at=capability: at
        )
        why_not_float8.cache_clear()
        if refused is None:
            check_float8(draft)
            continue
        with pytest.raises(
            ValueError,
            match=rf"^expected .* under draft_dtype=.*, got 'cuda:0 of .* {refused}'; leave",
        ):
            check_float8(draft)
    monkeypatch.setattr(torch, "_scaled_mm", _refuse)
    why_not_float8.cache_clear()
    with pytest.raises(
        ValueError, match=r"cannot multiply rows in FP8 \(not here\)'; leave draft_dtype out"
    ):
        check_float8(draft)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not here")


@pytest.mark.parametrize("target", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_eager_experts_are_found_to_count_on_the_host(target: str) -> None:
    run = run_of(Case(target=target))  # in the prefill they count too, where they may
    run.request.target.model.set_experts_implementation("eager")
    with pytest.raises(HostReadError, match="on the host"):
        captured_step(run)


def test_grouped_experts_count_on_the_host_of_other_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(Case(target="qwen3-30b-a3b", experts="grouped_mm"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(HostReadError, match=r"_grouped_mm.* on the host"):
        captured_step(run)


@pytest.mark.parametrize("target", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_experts_counted_on_the_host_are_known_early(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These weights are of a class of their own
    monkeypatch.setattr(Target, "takes_inference_mode", True)
    model = build_target(TARGETS[target](), "grouped_mm")
    draft = run_of(Case(target=SHORT)).generator.draft
    draft.generation_config.engine = "cuda_graph"

    def reason() -> str:
        """Why not; asked for by name it is a refusal with the same words."""
        found = find_target(model)
        why = why_not(found, draft)
        if why:
            with pytest.raises(ValueError, match=r"^expected experts that need no host") as refused:
                check_capturable(found, draft)
            assert why.partition(";")[0] in str(refused.value)
        else:
            check_capturable(found, draft)
        return why

    assert reason() == ""
    for capability in ((8, 0), (8, 6), (8, 9), (12, 0)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None, at=capability: at
        )
        assert (
            f"experts under 'grouped_mm' in torch.bfloat16 on compute capability {capability[0]}."
            in str(reason())
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert reason() == ""
    for dtype in (torch.float16, torch.float32):
        model = build_target(TARGETS[target](), "grouped_mm", dtype)
        assert f"experts under 'grouped_mm' in {dtype}" in str(reason())
    model.set_experts_implementation("batched_mm")
    assert reason() == ""


@pytest.mark.parametrize(
    ("target", "kernels", "warpers", "limit", "captures"),
    [
        (SHORT, None, "greedy", 2048, 1),
        (SHORT, None, "top-k", 2048, 1),
        (SHORT, None, "greedy", 32 * 1024, 1),
        (SHORT, False, "greedy", 2048, 10),
        (SHORT, False, "greedy", 32 * 1024, 25),
        # Its forward expands what is cached, of as many slots as are read.
        ("minicpm3-4b", None, "greedy", 2048, 10),
    ],
)
def test_one_graph_is_enough_where_the_device_reads_lengths(
    target: str, kernels: bool | None, warpers: str, limit: int, captures: int
) -> None:
    with ops.kernels(kernels):
        model = build_target(TARGETS[target]())
        draft = run_of(Case(target=target)).generator.draft
        run = begin(
            model, draft, 1, WARPERS[warpers](), warpers != "greedy", prompt=500, limit=limit
        )
        bounds = StaticStep(run).bounds()
    assert run.room == limit, "no step of the run is left to the eager loop"
    assert len(bounds) == captures
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] >= 500 + limit


def _groups(x: Tensor, dtype: torch.dtype) -> Tensor:
    first, second = (
        torch.zeros(size, dtype=dtype, device=x.device) for size in ((16, 16), (2, 16, 16))
    )
    return torch._grouped_mm(first, second, offs=x[:1, 1:3].flatten().int())


PLANTED: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "truth": lambda x: bool((x > 0).any()),
    "index by a mask": lambda x: x[x > 0],
    "copy to the host": lambda x: x.cpu(),
    "number from the host": lambda x: torch.tensor(3, device=x.device),
    "numbers from the host": lambda x: x[0].add_(torch.arange(x.shape[1]).to(x.device)),
    "put from the host": lambda x: x[0].copy_(torch.arange(x.shape[1])),
    "index from the host": lambda x: x[torch.zeros(2, dtype=torch.long)],
    "many ids": lambda x: torch.isin(x, torch.arange(99, device=x.device)),
    "groups in float32": lambda x: _groups(x, torch.float32),
    "inverse": lambda x: torch.linalg.inv(torch.zeros(4, 4, device=x.device)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_needs_the_host_is_found_in_the_same_step(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, verify = run_of(Case(target=SHORT)), static_module.verify

    def planted(*args: Any) -> Any:
        outputs = verify(*args)
        PLANTED[what](run.state.whole_block)
        return outputs

    monkeypatch.setattr(static_module, "verify", planted)
    with pytest.raises(HostReadError, match="the host"):
        captured_step(run)


def test_a_step_that_leaves_something_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(Case(target=SHORT))
    monkeypatch.setattr(step_module, "commit", lambda *args: None)
    assert not captured_step(run).written["outcome"]
