"""The kernel path of a step, in float64 by the operations' references: exact, still, and where it is not taken.

For float64 there are no kernels but that of `accept_and_prepare`, so the path is taken at the speed of torch; that
kernels compute what their references do is tested beside each. Without the references in between, `test_decode.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash_hf import ops
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedLayer
from dflash_hf.generation import buffers
from dflash_hf.generation.buffers import kept_buffers
from helpers.engine import GREEDY, Watched, freeze_each_step_first, pair
from helpers.half import half, pairs
from helpers.kernel_checks import DEVICES, Calls, calls_of, find_out
from helpers.static import Tape, TapeStep, TensorOracle, set_engine, tensor_oracle, use_tapes
from helpers.vision import shallow_vision_target, vision_prompts
from tiny import DFLASH2, DSPARK, prompts, shallow_target, tiny_draft, tiny_target, truth_of

NEW = 10
ENGINES = ["eager", "static", "cuda_graph"]
SLIDING: dict[str, Any] = {"sliding_window": 5, "window_from_anchor": True}
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dflash 2": DFLASH2,
    "dspark": DSPARK,
    "from the anchor": {"sample_from_anchor": True},
    "window from the anchor": SLIDING,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch)


def depth_of(target: Any) -> int:
    """Number of layers of a target."""
    return target.config.get_text_config().num_hidden_layers


def num_fused(target: Any) -> int:
    """Layers whose attention kernels compute in float64, where the norms of queries and keys keep Qwen3's out."""
    return depth_of(target) if target.config.model_type in ("llama", "mistral") else 0


def check_greedy(
    target: Any, inputs: dict[str, Tensor], calls: Calls, engine: Any, width: int, **options: Any
) -> Any:
    """Two calls, the second one over kept buffers, give the plain text; returns the draft."""
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 2, 6, **options)
    set_engine(draft, engine)
    TapeStep.captured.clear()
    draft.generation_config.verify_width = width
    find_out(target)
    for _ in range(2):
        calls.clear()
        with ops.kernels(True):
            out = target.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft
            )
        assert torch.equal(out, wanted)
        assert draft.last_stats.engine == engine
        assert draft.last_stats.acceptance_length > 1
        if engine != "cuda_graph":
            assert calls.all() == calls_of(draft, num_fused(target), depth_of(target))
        else:
            assert calls.all().keys() == calls_of(draft).keys()
            assert Tape.num_replays > 0
            # All layers read lengths on the device: whatever the length, one graph over the whole buffers.
            assert TapeStep.captured == [kept_buffers(draft)[0].capacity]
    return draft


@pytest.mark.parametrize(
    ("family", "lengths", "engine"),
    half(["qwen3-sliding", "llama3-rope", "gemma3", "phi3"], {"1": [9], "3": [4, 11, 7]}, ENGINES),
)
def test_the_kernel_path_gives_the_plain_text(
    family: str, lengths: list[int], engine: Any, calls: Calls
) -> None:
    check_greedy(shallow_target(family), prompts(lengths, 2), calls, engine, 6)


@pytest.mark.parametrize(("kind", "engine"), half(DRAFTS, ["eager", "cuda_graph"]))
def test_every_kind_of_draft_gives_the_plain_text(
    kind: dict[str, Any], engine: Any, calls: Calls
) -> None:
    check_greedy(shallow_target("mistral"), prompts([4, 11, 7], 2), calls, engine, 4, **kind)


def test_images_give_the_plain_text(calls: Calls) -> None:
    target = shallow_vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 4)], [], [(2, 8)]], 0)
    inputs = {
        name: t.to(target.dtype) if t.is_floating_point() else t for name, t in inputs.items()
    }
    check_greedy(target, inputs, calls, "static", 6)


@pytest.mark.parametrize(("num_ids", "engine"), half({"1": 1, "11": 11}, ["static", "cuda_graph"]))
def test_eos_and_limits_inside_a_block(num_ids: int, engine: Any) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([4, 11, 7], 1)
    free = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, free), 1, 8)
    set_engine(draft, engine)
    eos = [int(free[0, -NEW + 4]), int(free[1, -5]), *range(100, 120)][:num_ids]
    for new in (NEW, 7, 2):
        settings = {
            "max_new_tokens": new,
            "do_sample": False,
            "eos_token_id": eos,
            "pad_token_id": 0,
        }
        wanted = target.generate(**inputs, **settings)
        with ops.kernels(True):
            assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), wanted)


@pytest.mark.parametrize(
    ("kind", "proposal", "engine"),
    pairs(
        {"dflash": {}, "dflash 2": DFLASH2, "dspark": DSPARK},
        ["argmax", "shared_noise", "sample"],
        ENGINES,
    ),
)
def test_a_sampled_text_is_that_without_kernels(
    kind: Any, proposal: Any, engine: Any, calls: Calls
) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([4, 11, 7], 4)
    draft = tiny_draft(target, 6, **kind)
    draft.generation_config.proposal = proposal
    texts: list[Tensor] = []
    for chosen, enabled in (("eager", False), (engine, True)):
        set_engine(draft, chosen)
        torch.manual_seed(5)
        settings = {
            "max_new_tokens": NEW,
            "do_sample": True,
            "temperature": 0.4,
            "top_k": 20,
            "eos_token_id": [9],
        }
        with ops.kernels(enabled):
            texts.append(
                target.generate(**inputs, **settings, pad_token_id=0, assistant_model=draft)
            )
        assert (len(calls.all()) >= 4) == enabled
    assert torch.equal(texts[0], texts[1])


class Recording(TensorOracle):
    """Keeps every block it runs."""

    def forward_block(self, noise_embeds: Tensor, cache: Any, context: Any = None) -> Tensor:
        hidden = super().forward_block(noise_embeds, cache, context)
        rows = self.rows_of(len(hidden))
        self.blocks.append(
            (rows, cache.block.lengths.clone(), noise_embeds.clone(), hidden.clone())
        )
        return hidden


def check_context(
    target: Any, engine: Any, lengths: list[int], new: int, tolerance: float, **options: Any
) -> None:
    """What the draft sees is what it would see in one forward, in torch, over all that is committed."""
    inputs = prompts(lengths, 6)
    wanted = target.generate(**inputs, max_new_tokens=new, do_sample=False)
    truth = truth_of(inputs, wanted)
    draft = tensor_oracle(target, truth, 3, 4, **options)
    for layer in draft.layers:
        torch.nn.init.normal_(layer.self_attn.k_norm.weight)
        torch.nn.init.normal_(layer.self_attn.q_norm.weight)
    draft.__class__, draft.blocks = Recording, []
    set_engine(draft, engine)
    with ops.kernels(True):
        out = target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    assert draft.last_stats.acceptance_length > 1.3
    taps = draft.config.target_layer_ids
    with torch.no_grad():
        features = [
            torch.cat(
                [
                    target(torch.tensor([row]), output_hidden_states=True).hidden_states[i + 1]
                    for i in taps
                ],
                -1,
            )
            for row in truth
        ]
        checked = 0
        for rows, starts, noise, hidden in draft.blocks:
            for place, (row, start) in enumerate(zip(rows, starts.tolist(), strict=True)):
                once = draft(noise[place : place + 1], features[row][:, :start]).last_hidden_state[
                    0
                ]
                assert (once - hidden[place]).abs().max() < tolerance * once.abs().max()
                checked += start > lengths[row]
    assert checked > 3


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("kind", [{}, SLIDING, DFLASH2], ids=["plain", "sliding", "dflash 2"])
def test_the_draft_sees_what_was_committed(kind: dict[str, Any], engine: Any) -> None:
    # The draft's modules norm in float32, the references as wide as their input.
    check_context(tiny_target("qwen3"), engine, [4, 17, 9], 24, 1e-5, **kind)


@pytest.mark.parametrize("device", DEVICES[:1])
def test_the_draft_sees_what_was_committed_by_the_kernels(device: str, calls: Calls) -> None:
    small = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny_target("qwen3", **small, num_hidden_layers=3).float()
    check_context(target, "static", [5, 3], 7, 1e-4, **small, target_layer_ids=[0, 1])
    assert not calls.references
    assert calls.kernels["context_kv"] > 1


PAIRS = {
    "plain": ("qwen3-sliding", {}),
    "dflash 2": ("mistral", DFLASH2),
    "anchor": ("qwen3", DRAFTS["from the anchor"]),
}


@pytest.mark.parametrize(("sampling", "name"), half([False, True], list(PAIRS)))
def test_no_tensor_moves_and_steps_do_not_follow_acceptance(
    sampling: bool, name: str, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 128)
    family, overrides = PAIRS[name]
    target, draft, inputs, _ = pair("static", family, **overrides)
    draft.generation_config.proposal = "sample" if sampling else "auto"
    watched = Watched(monkeypatch)
    settings = (
        {"do_sample": True, "temperature": 0.02, "top_k": 9} if sampling else {"do_sample": False}
    )
    settings |= {"max_new_tokens": 26, "eos_token_id": [9], "pad_token_id": 0}
    find_out(target)
    calls.clear()
    with ops.kernels(True):
        target.generate(**inputs, **settings, assistant_model=draft)
    accepted = {count for row in draft.last_stats.num_accepted for count in row}
    assert len(accepted) > 2, "blocks of which different numbers are right"
    assert calls.all() == calls_of(draft, num_fused(target), depth_of(target))
    watched.check()


def test_a_step_over_finished_rows_changes_only_scratch(
    monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    target, draft, inputs, ref = pair("static")
    frozen = freeze_each_step_first(monkeypatch)
    with ops.kernels(True):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert len(frozen) > 3
    assert calls.all()["accept_and_prepare"] == 1 + 2 * len(frozen)


def test_a_graph_replays_the_kernels_of_its_capture(calls: Calls) -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    for enabled in (True, False, True):
        before = calls.all()["accept_and_prepare"]
        with ops.kernels(enabled):
            assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert (calls.all()["accept_and_prepare"] > before) == enabled


def test_copies_of_weights_are_made_anew_in_their_place() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    places: list[int] = []
    for _ in range(2):
        with ops.kernels(True):
            assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        (kept,) = kept_buffers(draft)
        attentions = [layer.self_attn for layer in draft.layers]
        now = torch.cat([p.weight for a in attentions for p in (a.k_proj, a.v_proj)])
        assert torch.equal(kept.newest.weights.projection, now)
        assert torch.equal(
            kept.newest.weights.norm, torch.stack([a.k_norm.weight for a in attentions])
        )
        places.append(kept.newest.weights.projection.data_ptr())
        with torch.no_grad():
            attentions[1].k_proj.weight.mul_(-0.5)
            attentions[0].k_norm.weight.mul_(2.0)
    assert len(set(places)) == 1


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("what", ["bias", "hook", "forward"])
def test_projections_beyond_a_weight_take_the_torch_path(
    what: str, engine: Any, calls: Calls
) -> None:
    options = {"attention_bias": True} if what == "bias" else {}
    target, draft, inputs, ref = pair(engine, **options)
    find_out(target)
    calls.clear()
    seen: list[int] = []
    projection: Any = draft.layers[1].self_attn.v_proj

    def noted(states: Tensor) -> Tensor:
        seen.append(1)
        return nn.functional.linear(states, projection.weight)

    if what == "hook":
        projection.register_forward_hook(lambda *args: seen.append(1))
    if what == "forward":
        projection.forward = noted
    with ops.kernels(True):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    wanted = calls_of(draft, num_layers=depth_of(target))
    wanted["norm_rope_write"] = wanted["context_kv"] = 0
    assert calls.all() == +wanted
    assert len(seen) == (0 if what == "bias" else draft.last_stats.num_draft_forwards + 1), (
        "the prompt too"
    )


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("family", ["qwen3-sliding", "qwen3.5"])
def test_kept_buffers_are_emptied_only_if_they_are_read(
    family: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in every slot between two calls: in full layers kernels read none that their run has not written."""
    target, draft, inputs, wanted = pair("static", family)
    cleared: list[RaggedLayer] = []
    clear = RaggedLayer.clear

    def noted(self: RaggedLayer) -> None:
        cleared.append(self)
        clear(self)

    monkeypatch.setattr(RaggedLayer, "clear", noted)
    for _ in range(2):
        with ops.kernels(enabled):
            assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), wanted)
        (kept,) = kept_buffers(draft)
        layers = [layer for cache in (kept.draft_cache, kept.cache) for layer in cache.layers]
        for layer in layers:
            if isinstance(layer, RaggedLayer):
                layer.key_buffer.fill_(torch.nan)
                layer.value_buffer.fill_(torch.nan)
    ragged = [layer for layer in layers if isinstance(layer, RaggedLayer)]
    wanted_cleared = [layer for layer in ragged if layer.shape.window is not None or not enabled]
    assert [id(layer) for layer in cleared] == [id(layer) for layer in wanted_cleared]
    assert len(wanted_cleared) < len(ragged) or not enabled


def test_what_the_host_decides_is_committed_by_the_kernel(calls: Calls) -> None:
    target, draft, inputs, _ = pair("static")
    wanted = target.generate(**inputs, **GREEDY, repetition_penalty=1.3)
    with ops.kernels(True):
        out = target.generate(**inputs, **GREEDY, repetition_penalty=1.3, assistant_model=draft)
    assert torch.equal(out, wanted)
    assert calls.all()["accept_and_prepare"] == draft.last_stats.num_target_forwards
    assert calls.all()["context_kv"] == draft.last_stats.num_draft_forwards


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_a_conversation_over_a_kept_cache_goes_on(engine: Any, calls: Calls) -> None:
    """The last block's context is written behind the last step: by the same kernel."""
    target = shallow_target("qwen3-sliding")
    inputs = prompts([5, 9], 1)
    settings: dict[str, Any] = {
        "max_new_tokens": 13,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    plain, ours = DynamicCache(config=target.config), DynamicCache(config=target.config)
    draft: Any = None
    for turn in range(2):
        ref = target.generate(**inputs, **settings, **{CACHE_NAME: plain})
        truth = truth_of(inputs, ref.sequences)
        draft = tensor_oracle(target, truth, turn, 6) if draft is None else draft.arm(truth, turn)
        set_engine(draft, engine)
        calls.clear()
        with ops.kernels(True):
            out = target.generate(**inputs, **settings, **{CACHE_NAME: ours}, assistant_model=draft)
        assert torch.equal(out.sequences, ref.sequences)
        assert calls.references["context_kv"] > calls_of(draft)["context_kv"]
        assert draft.last_stats.acceptance_length > 1
        more = torch.randint(3, 60, (2, 4), generator=torch.Generator().manual_seed(turn))
        ids = torch.cat([ref.sequences, more], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 17, dtype=torch.long)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": mask}
