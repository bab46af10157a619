"""What only a GPU can show: the same texts, attention and gradients there, and steps without a sync.

Nearly every test runs on the CPU too, with the same code, so that a mistake in a test is found where there is no GPU.
There, reading a tensor on the host is caught by a dispatch mode instead of CUDA's own debug mode. bfloat16 is compared
with an ordinary eager forward of the same width, and runs on the GPU only.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache, PreTrainedModel

from dflash_hf import DFlashDraftModel
from dflash_hf.block.attention import RaggedBlock, attend, mask_repeats
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.block.positions import slot_positions, visible
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.generation import decode
from dflash_hf.generation.run import Run, tapped
from dflash_hf.generation.step import accept, report, verify
from dflash_hf.generation.step import draft as draft_block
from dflash_hf.target_model.parts import find_target
from dflash_hf.training import forward
from dflash_hf.training.anchors import BlockMaskRule, sample_anchors
from dflash_hf.training.collators import Batch, collate
from dflash_hf.training.example import Example
from dflash_hf.training.forward import batch_loss, run_blocks, target_features
from dflash_hf.training.loss import decay_weights
from helpers.half import half
from helpers.host_reads import no_host_reads
from helpers.whole_blocks import use_whole_blocks
from tiny import DFLASH2, FAMILIES, oracle_draft, prompts, tiny_draft, tiny_target, truth_of

CPU = "cpu"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [CPU, CUDA]
NEW = 24
LENGTHS = [4, 11, 7]
# Against Transformers' eager attention, whose softmax is float32 in every dtype; bfloat16 has 8 bits, and four random
# layers amplify a rounding.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2}


def on(device: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same prompts on a device."""
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def lengths_for(family: str, dtype: torch.dtype) -> list[int]:
    """Prompt lengths of a batch; all alike for Gemma 2 in float64.

    Its eager attention adds float64's lowest number and takes a float32 softmax: in a padded batch plain `generate`
    itself computes NaN there.
    """
    return [9, 9, 9] if family == "gemma2" and dtype == torch.float64 else LENGTHS


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """`|ours - reference| / |reference|` in float64."""
    wanted = reference.double().cpu()
    return float((ours.double().cpu() - wanted).norm() / wanted.norm())


# ---- decoding gives plain generate's text


def check_greedy(
    target: PreTrainedModel,
    device: str,
    seed: int,
    draft_device: str | None = None,
    lengths: list[int] = LENGTHS,
    **overrides: Any,
) -> None:
    """Decodes a batch with a partly right draft and compares with plain `generate` on the same device."""
    inputs = on(device, prompts(lengths, seed))
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), seed, 8, **overrides).to(
        draft_device or device
    )
    out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert out.device.type == torch.device(device).type
    assert torch.equal(out, ref)
    assert bool((ref[:, -NEW:] != 0).any(dim=1).all()), "a row of token 0 is what NaN decodes to"
    assert 1.0 < draft.last_stats.acceptance_length < 8.0, "the oracle has to be partly right"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", [CUDA])
def test_every_family_gives_the_plain_text(device: str, dtype: torch.dtype, family: str) -> None:
    check_greedy(
        tiny_target(family).to(device, dtype), device, seed=0, lengths=lengths_for(family, dtype)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_ragged_rows_give_the_plain_text(device: str) -> None:
    target = tiny_target("qwen3-sliding").to(device)
    for seed, lengths in enumerate([[9], [4, 11, 7], [12, 3, 5, 9, 1, 7, 2, 8]]):
        check_greedy(target, device, seed, lengths=lengths)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [{}, DFLASH2], ids=["dflash", "dflash 2"])
def test_a_draft_on_another_device_gives_the_plain_text(kind: dict[str, Any], device: str) -> None:
    check_greedy(tiny_target("qwen3").to(device), device, seed=3, draft_device="cpu", **kind)


@pytest.mark.gpu
@pytest.mark.parametrize("draft_device", ["cuda", "cpu"])
@pytest.mark.parametrize("head", ["cuda", "cpu"])
@pytest.mark.parametrize("offload", [False, True])
def test_layers_on_several_devices_give_the_plain_text(
    offload: bool, head: str, draft_device: str
) -> None:
    """Layers on the GPU and the CPU in turn: computed on each, or (`offload`) brought to the GPU for each call."""
    places: dict[str, Any] = {f"model.layers.{i}": "cpu" if i % 2 else 0 for i in range(4)}
    places |= {
        "model.embed_tokens": 0,
        "model.norm": 0,
        "model.rotary_emb": 0,
        "lm_head": 0 if head == "cuda" else "cpu",
    }
    target: Any = tiny_target("qwen3-sliding")
    if offload:
        target = dispatch_model(target, places, main_device=0)
        assert any(parameter.is_meta for parameter in target.parameters())
    else:
        execution = {name: torch.device(place) for name, place in places.items()}
        # The model itself is in one list only, or its hook would take all blocks to its own device.
        attach_align_device_hook_on_blocks(
            target,
            execution | {"": torch.device(0)},
            offload=dict.fromkeys(places, False),
            skip_keys=[CACHE_NAME],
        )
        assert {parameter.device.type for parameter in target.parameters()} == {"cuda", "cpu"}
    for seed, lengths in enumerate([[9], LENGTHS]):
        check_greedy(target, "cuda", seed, draft_device=draft_device, lengths=lengths)


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_text_does_not_depend_on_the_block(device: str) -> None:
    target = tiny_target("qwen3").to(device)
    inputs = on(device, prompts(LENGTHS, 1))
    draft = tiny_draft(target, 8).to(device)
    draft.generation_config.proposal = "shared_noise"
    texts = []
    for width in (1, 3, 8):
        draft.generation_config.verify_width = width
        torch.manual_seed(5)
        texts.append(
            target.generate(**inputs, max_new_tokens=NEW, do_sample=True, assistant_model=draft)
        )
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


class VerifyRecord:
    """Keeps the inputs and logits of every forward over the ragged cache: a context manager around a run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __enter__(self) -> VerifyRecord:
        self.handle = self.model.register_forward_hook(self.keep, with_kwargs=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.handle.remove()

    def keep(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Copies ids, lengths and logits of a verify."""
        if (ragged := kwargs.get("ragged")) is not None:
            self.calls.append(
                (kwargs["input_ids"].clone(), ragged.block.lengths.clone(), output.logits.clone())
            )


VERIFIED = ("qwen3", "gemma2", "gpt-oss", "mistral")
# A rounding sends a token to another expert, which is no small error: no mixture of experts in bfloat16.
VERIFY_CASES = [
    *((CPU, dtype, family) for dtype in (torch.float64, torch.float32) for family in VERIFIED),
    *(
        pytest.param("cuda", dtype, family, marks=pytest.mark.gpu)
        for dtype in TOLERANCES
        for family in VERIFIED
        if dtype != torch.bfloat16 or family != "gpt-oss"
    ),
]


@pytest.mark.parametrize(("device", "dtype", "family"), VERIFY_CASES, ids=str)
@torch.no_grad()
def test_verify_equals_an_eager_forward_of_the_same_width(
    device: str, dtype: torch.dtype, family: str
) -> None:
    target = tiny_target(family).to(device, dtype)
    inputs = on(device, prompts(lengths_for(family, dtype), 2))
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 2, 8).to(device)
    with VerifyRecord(target) as record:
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    rows = truth_of(inputs, out)
    target.set_attn_implementation("eager")
    errors = []
    for ids, lengths, logits in record.calls[:6]:
        for row, tokens in enumerate(rows):
            length = int(lengths[row])
            cache = DynamicCache(config=target.config)
            prefix = torch.tensor([tokens[:length]], device=device)
            target(input_ids=prefix, **{CACHE_NAME: cache}, use_cache=True)
            again = target(input_ids=ids[row : row + 1], **{CACHE_NAME: cache}, use_cache=True)
            errors.append(relative_error(logits[row], again.logits[0]))
    assert len(errors) == 6 * len(rows)
    assert max(errors) < TOLERANCES[dtype]


# ---- steps wait for nothing


# Families of targets and kinds of drafts.
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-sliding": ("qwen3-sliding", {}),
    "gemma3": ("gemma3", {}),
    "DFlash 2": ("qwen3", DFLASH2),
}


@pytest.mark.parametrize("device", DEVICES)
def test_the_check_for_host_reads_finds_one(device: str) -> None:
    tensor = torch.ones(3, device=device)
    with pytest.raises(RuntimeError), no_host_reads(device):
        tensor.sum().item()
    with pytest.raises(RuntimeError), no_host_reads(device):
        tensor.nonzero()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("pair", "proposal"), half(PAIRS, ["greedy", "shared_noise", "argmax", "sample"])
)
def test_steps_read_nothing_on_the_host(
    proposal: Any,
    pair: tuple[str, dict[str, Any]],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, kind = pair
    target = tiny_target(family).to(device)
    draft = tiny_draft(target, 6, **kind).to(device)
    draft.generation_config.engine = "eager"
    settings: dict[str, Any] = {
        "max_new_tokens": 10,  # later steps do the same, and the guard is slow
        "do_sample": False,
        "eos_token_id": [2, 9],
        "pad_token_id": 0,
    }
    if proposal != "greedy":
        draft.generation_config.proposal = proposal
        settings |= {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    if proposal == "sample":
        # Rejection draws another text at another width, and the loop below chooses none
        use_whole_blocks(draft)
    inputs = on(device, prompts(LENGTHS, 4))
    torch.manual_seed(0)
    wanted = target.generate(**inputs, **settings, assistant_model=draft)
    num_guarded = 0

    def guarded(run: Run, engine: str) -> None:
        """`decode.advance`, with each step under guard once each has run and loaded its kernels."""
        nonlocal num_guarded
        with torch.no_grad(), tapped(run):
            while not bool(run.state.done.all()):
                with nullcontext() if num_guarded == 0 else no_host_reads(device):
                    step(run)
                num_guarded += 1
                report(run, run.state.outcome.cpu(), run.state.width)

    def step(run: Run) -> None:
        logits = verify(run, draft_block(run)).logits
        assert logits is not None
        accept(run, logits)

    monkeypatch.setattr(decode, "advance", guarded)
    torch.manual_seed(0)
    out = target.generate(**inputs, **settings, assistant_model=draft)
    assert num_guarded > 2
    assert torch.equal(out, wanted)


# ---- attention and the draft


def by_the_book(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in float64 on the CPU, head by head, from the formula; `[B, K, H, E]`."""
    query, key, value = (t.double().cpu() for t in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // repeats].mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen.cpu(), -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (
            0 if sinks is None else sinks.double().cpu()[head].exp()
        )
        heads.append(weights / total @ value[:, head // repeats])
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (None, False), (5, True), (5, False)])
def test_attention_equals_the_formula(
    window: int | None,
    causal: bool,
    has_sinks: bool,
    softcap: float | None,
    dtype: torch.dtype,
    device: str,
) -> None:
    torch.manual_seed(0)
    batch, heads, groups, width, num_slots, size = 3, 6, 2, 4, 23, 16
    query = torch.randn(batch, heads, width, size).to(device, dtype)
    # As the cache hands them out: views of token-major buffers.
    key, value = (
        torch.randn(batch, num_slots, groups, size).to(device, dtype).transpose(1, 2)
        for _ in range(2)
    )
    sinks = torch.randn(heads).to(device, dtype) if has_sinks else None
    block = RaggedBlock.at(torch.tensor([0, 7, 19], device=device), width)
    mask = block.mask(
        num_slots,
        (window, causal, False),
        mask_repeats(heads // groups, width, num_slots, query.device, dtype),
        dtype,
    )
    last = block.lengths[:, None, None] + width - 1
    held = slot_positions(last, torch.arange(num_slots, device=device), num_slots)
    seen = visible(block.positions[:, :, None], held, window, causal)
    out = attend(query, key, value, mask, 0.3, softcap=softcap, sinks=sinks)
    wanted = by_the_book(query, key, value, seen, 0.3, softcap, sinks)
    # One rounding of the output and of the weights per dtype.
    assert (
        relative_error(out, wanted)
        < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    )


@pytest.fixture
def examples() -> list[Example]:
    """Three conversations of random tokens."""
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in (13, 10, 15)]
    return [Example.from_pair(ids[:4], ids[4:]) for ids in drawn]


def training_pair(device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """A target and a draft with a causal, a sliding and a full layer."""
    target = tiny_target("qwen3").to(device, dtype).requires_grad_(False)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    changes = {
        "num_hidden_layers": 3,
        "layer_types": kinds,
        "sliding_window": 4,
        "is_causal": [True, False, False],
        "head_dim": 16,  # the least that FlexAttention compiles for
    }
    return target, tiny_draft(target, 6, **changes).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_draft_over_the_ragged_cache_equals_the_combined_forward(
    device: str, examples: list[Example]
) -> None:
    target, draft = training_pair(device, torch.float64)
    found, batch = find_target(target), collate(examples)
    anchors = sample_anchors(batch.loss_mask, 1, 6, torch.Generator().manual_seed(0)).to(
        torch.device(device)
    )
    batch = batch.to(torch.device(device))
    taps = target_features(found, [0, 2], batch).taps
    together = run_blocks(draft, found, batch, taps, anchors)
    lengths = anchors.indices[:, 0]
    columns = torch.arange(batch.input_ids.shape[1], device=device).expand(batch.input_ids.shape)
    cache = RaggedCache(draft.cache_shapes(), batch=3, max_length=40, block=6)
    draft.write_prompt(taps, torch.where(columns < lengths[:, None], columns, -1), cache)
    cache.begin(RaggedBlock.at(lengths, 6))
    ids = torch.full((3, 6), draft.config.mask_token_id, device=device)
    ids[:, 0] = batch.input_ids.gather(1, anchors.indices)[:, 0]
    alone = draft.forward_block(draft.embed(ids, found.embedding), cache)
    assert relative_error(alone, together) < 1e-9


def loss_and_gradients(
    target: PreTrainedModel, draft: DFlashDraftModel, batch: Batch, taps: Tensor, flex: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The draft's states over several blocks under one kind of mask, and the gradients of their weighted sum."""
    anchors = sample_anchors(batch.loss_mask.cpu(), 3, 6, torch.Generator().manual_seed(0)).to(
        taps.device
    )
    draft.zero_grad()
    states = run_blocks(
        draft, find_target(target), batch, taps, anchors, "flex" if flex else "sdpa"
    )
    weights = torch.linspace(
        -1, 1, states.numel(), device=states.device, dtype=states.dtype
    ).view_as(states)
    (states * weights).sum().backward()
    return states.detach(), {
        n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("device", [CUDA])
def test_block_masks_train_like_dense_masks(device: str, examples: list[Example]) -> None:
    target, draft = training_pair(device, torch.float32)
    batch = collate(examples).to(torch.device(device))
    taps = target_features(find_target(target), [0, 2], batch).taps
    dense, dense_gradients = loss_and_gradients(target, draft, batch, taps, flex=False)
    flexible, gradients = loss_and_gradients(target, draft, batch, taps, flex=True)
    assert relative_error(flexible, dense) < 1e-4
    assert gradients.keys() == dense_gradients.keys()
    assert gradients
    for name, gradient in gradients.items():
        assert relative_error(gradient, dense_gradients[name]) < 1e-3, name


# Uncompiled, as on a CPU, FlexAttention has no backward pass.
@pytest.mark.parametrize(
    ("device", "flex"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
def test_a_step_under_autocast_is_near_float32(
    device: str, flex: bool, examples: list[Example]
) -> None:
    """As `dflash-hf train` runs it: float32 weights, products in bfloat16, and FlexAttention on a GPU."""
    target, draft = training_pair(device, torch.float32)
    batch = collate(examples).to(torch.device(device))
    taps = target_features(find_target(target), [0, 2], batch).taps
    exact, exact_gradients = loss_and_gradients(target, draft, batch, taps, flex=False)
    with torch.autocast(device, torch.bfloat16):
        states, gradients = loss_and_gradients(target, draft, batch, taps, flex=flex)
    # bfloat16 has 8 bits, and three layers add roundings up.
    assert relative_error(states, exact) < 5e-2
    assert gradients.keys() == exact_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, exact_gradients[name]) < 1e-1, name


@pytest.mark.parametrize("device", [CUDA])
def test_batches_of_many_shapes_are_trained_by_block_masks(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiled function for all: no shape makes FlexAttention, or the compilation of its mask, give up."""
    failures: list[str] = []
    monkeypatch.setattr(forward, "_flex_failures", failures)
    target, draft = training_pair(device, torch.float32)
    draft.train()
    weights = decay_weights(6, 3.0)
    for length, rows, number in (
        (40, 2, 5),
        (200, 3, 31),
        (331, 1, 64),
        (129, 4, 12),
        (520, 2, 70),
        (260, 5, 40),
    ):
        ids = torch.randint(
            3, 60, (rows, length), generator=torch.Generator().manual_seed(length)
        ).tolist()
        batch = collate([Example.from_pair(row[:7], row[7:]) for row in ids])
        anchors = sample_anchors(batch.loss_mask, number, 6, torch.Generator().manual_seed(0))
        losses, gradients = [], []
        for attention in ("auto", "sdpa"):
            draft.zero_grad()
            result = batch_loss(
                draft, find_target(target), batch, anchors, weights, attention=attention
            )
            (result.loss / result.weight).backward()
            losses.append(result.loss.item() / result.weight.item())
            gradients.append(draft.fc.weight.grad.clone())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert relative_error(*gradients) < 1e-3
    assert not failures


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_block_masks_hide_what_dense_masks_hide(device: str, examples: list[Example]) -> None:
    target, draft = training_pair(device, torch.float32)
    batch = collate(examples)
    anchors = sample_anchors(batch.loss_mask, 3, 6, torch.Generator().manual_seed(0)).to(
        torch.device(device)
    )
    batch = batch.to(torch.device(device))
    taps = target_features(find_target(target), [0, 2], batch).taps
    masks = BlockMaskRule(batch.attention_mask, anchors).masks(draft.config, flex=True)
    assert all(isinstance(mask, BlockMask) for mask in masks.values())
    dense, flexible = (
        run_blocks(draft, find_target(target), batch, taps, anchors, flex)
        for flex in ("sdpa", "flex")
    )
    assert relative_error(flexible, dense) < 1e-4
