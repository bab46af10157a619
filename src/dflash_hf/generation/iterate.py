"""Decoding one verify at a time, to look at it and to try other rules: `for step in iterate(target, draft, ...)`.

The run is `generate`'s own: the same preparation, prefill and step function, with a pause after each step. Nothing is
held during a pause: no hook, no switched attention.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf.devices import Inventory, eagerly, is_compiled
from dflash_hf.generation.accept import Accept, BlockRule
from dflash_hf.generation.candidate_generator import Propose
from dflash_hf.generation.checks import check_iterated, check_rules
from dflash_hf.generation.decode import no_gradients
from dflash_hf.generation.generate import answer_with, unwrapped
from dflash_hf.generation.prefill import prefill
from dflash_hf.generation.run import Request, Run
from dflash_hf.generation.step import step
from dflash_hf.generation.user_cache import NoUserCache
from dflash_hf.generation.widths import FixedWidth
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.scopes import calling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DFlashStep:
    """What one step did. `B` rows, `W` verified tokens; copies, on the target's device, that may be kept.

    Step 0 is the prefill: it commits one token of the target's own and has no proposals (`W` is 1). Under
    `verify_width="auto"` every step has its own `W`.

    Args:
        index (`int`): Number of the step.
        anchor (`torch.Tensor` of shape `[B]`, int64): The committed token that the block begins with.
        proposals (`torch.Tensor` of shape `[B, W - 1]`, int64): What the draft proposed after it.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): The target's token after the anchor and after each proposal.
            Under `proposal="sample"`, what rejection sampling left: the proposals, and at `num_accepted` the redrawn
            token. With processors that read the prefix, or where rows advance together (stopping criteria, processors
            of the user's own), only as far as something was decided; zeros or leftovers behind it.
        positions (`torch.Tensor` of shape `[B, W]`, int64): Index of each of `tokens` in its row, padding not counted.
        num_accepted (`torch.Tensor` of shape `[B]`, int64): Proposals that stand, before any cut; 0 in finished rows.
        committed (`list[torch.Tensor]`): Per row, the tokens that were committed `[n]`, int64; empty in finished rows.
        done (`torch.Tensor` of shape `[B]`, bool): Rows that have finished, this step included.
        logits (`torch.Tensor` of shape `[B, W, V]`, *optional*): The target's, unprocessed; with `output_logits`, not
            of the prefill.
        draft_logits (`torch.Tensor` of shape `[B, W - 1, V]`, *optional*): The draft's; with `output_logits`.
        node_ids (`torch.Tensor` of shape `[B, W]`, int64, *optional*): Under `num_tree_nodes`, the tokens of the tree
            that was verified, the anchor first. `proposals`, `tokens` and `logits` are those of the path that was
            accepted, and `proposals` are -1 behind its end.
        parents (`torch.Tensor` of shape `[B, W]`, int64, *optional*): Which node each of them follows.
        hidden_states (`torch.Tensor` of shape `[B, W, L * D]`, *optional*): Tapped states of the anchor and the
            proposals, as the draft gets them; with `output_hidden_states`, not of the prefill.
    """

    index: int
    anchor: Tensor
    proposals: Tensor
    tokens: Tensor
    positions: Tensor
    num_accepted: Tensor
    committed: list[Tensor]
    done: Tensor
    logits: Tensor | None = None
    draft_logits: Tensor | None = None
    hidden_states: Tensor | None = None
    node_ids: Tensor | None = None
    parents: Tensor | None = None


def iterate(
    model: PreTrainedModel,
    draft: DFlashDraftModel,
    *,
    propose: Propose | None = None,
    accept: Accept | None = None,
    output_logits: bool = False,
    output_hidden_states: bool = False,
    **kwargs: Any,
) -> Generator[DFlashStep]:
    """Does what `model.generate(**kwargs, assistant_model=draft)` does, one [`DFlashStep`] at a time.

    Checks and prefill happen at the call, each verify when the next step is asked for. The committed tokens of all
    steps, joined row by row, are the new tokens of `generate`. Statistics are in `draft.last_stats`, up to date at
    every pause and without the time spent in pauses. Closing the iterator early, or dropping it, needs no clean-up.

    Args:
        model (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): Its draft.
        propose (callable, *optional*): `propose(logits, anchor) -> proposals` instead of the draft's own rule: its
            logits `[B, W - 1, V]` and the token before them `[B]` to int64 `[B, W - 1]`. Any rule keeps the
            text exact.
        accept (callable, *optional*): `accept(proposals, tokens, logits) -> num_accepted` instead of the longest
            matching prefix: proposals `[B, W - 1]`, the target's tokens `[B, W]` and its unprocessed logits
            `[B, W, V]` to integers `[B]` in `[0, W - 1]`. That many proposals are committed, then the target's token
            behind them: a rule that keeps more than the matching prefix is lossy.
        output_logits, output_hidden_states (`bool`): Also give out logits, and tapped states. They cost memory.
        kwargs: Arguments of `generate`: inputs, settings, processors, criteria, streamer.

    Returns:
        An iterator of [`DFlashStep`]; rows, dtypes and devices as in `generate`.

    Raises:
        ValueError: For what `generate` with a draft refuses; for a rule of one's own under `proposal="sample"` or
            `num_tree_nodes`; for `accept` beside processors that read the prefix or criteria of one's own; for rules
            that return another shape, dtype or range; for a cache that is passed in.
    """
    draft = unwrapped(draft)
    check_iterated(draft, kwargs)
    start = functools.partial(_start, propose=propose, accept=accept)
    run = answer_with(start, cast(Any, model).generate, model, draft, kwargs)
    draft.last_stats = run.stats
    run.generator.keeps_logits = output_logits
    return _steps(run, output_logits, output_hidden_states)


def _start(request: Request, inputs: dict[str, Any], propose: Propose | None, accept: Accept | None) -> Run:
    """Stands where `decode` stands, and returns after the prefill."""
    check_rules(request, has_propose=propose is not None, has_accept=accept is not None)
    with eagerly(request.target.parts, request.draft_parts):
        run = prefill(request, inputs, NoUserCache(), is_looked_at=True)
    if request.draft.generation_config.verify_width is None:
        # To be looked at, a run drafts at every step.
        run.chooser = FixedWidth(run.generator.verify_width)
    if propose is not None:
        run.generator.rule_of_user = _Checked(propose, dims=2, highest=run.request.target.vocab_size - 1)
    if accept is not None:
        assert isinstance(run.rule, BlockRule)
        run.rule.rule_of_user = _Checked(accept, dims=1)
    return run


def _steps(run: Run, output_logits: bool, output_hidden_states: bool) -> Generator[DFlashStep]:
    """Yields the prefill, then one step after the other; nothing is held while it waits."""
    state = run.state
    models = (run.request.target.parts, Inventory.of(run.generator.draft))
    # Looked up once: every part of both models has to be asked.
    compiled = [parts for parts in models if is_compiled(parts)]
    # The prefill, as if it had verified the prompts' last tokens.
    state.width = 1
    logits = None
    counts = run.reported.committed
    before = state.ids[:, state.columns - 1], state.lengths - 1
    for index in itertools.count():
        if index:
            with calling(), run.request.ranks.together(), eagerly(*compiled), no_gradients(run.request.target):
                run.watch.last = time.perf_counter()  # the pause was the user's own
                before = state.anchor.clone(), state.lengths.clone()
                logits, counts = step(run)
        # Outside inference mode, so that autograd takes the copies.
        anchor, lengths = (tensor.clone() for tensor in before)
        is_verify = index > 0
        tokens = state.tokens
        if is_verify and isinstance(run.rule, BlockRule) and isinstance(run.rule.rule_of_user, _Checked):
            tokens = run.rule.rule_of_user.second
        has_states = output_hidden_states and is_verify
        report = state.report
        yield DFlashStep(
            index=index,
            anchor=anchor,
            proposals=state.proposals.clone(),
            tokens=tokens.clone(),
            positions=lengths[:, None] + torch.arange(1, state.width + 1, device=lengths.device),
            num_accepted=state.outcome[1].masked_fill(torch.tensor(counts, device=lengths.device) == 0, 0),
            committed=[
                state.ids[row, end - count : end].clone()
                for row, (end, count) in enumerate(zip(state.cursor.tolist(), counts, strict=True))
            ],
            done=state.done.clone(),
            logits=_copy(logits) if output_logits else None,
            draft_logits=_copy(run.generator.logits) if output_logits else None,
            hidden_states=run.generator.newest.states.clone() if has_states else None,
            node_ids=None if report is None else report.node_ids.clone(),
            parents=None if report is None else report.parents.clone(),
        )
        if run.finished:
            break
    if run.request.streamer is not None:
        run.request.streamer.end()


def _copy(tensor: Tensor | None) -> Tensor | None:
    """Returns a copy of a tensor, if there is one."""
    return None if tensor is None else tensor.clone()


class _Checked:
    """A rule of the user's, with what it returns checked: integers in `[0, highest]`, in the shape of the first `dims`
    dimensions of its first argument. By default `highest` is the size of that argument's second: all proposals.

    `second` keeps a copy of its second argument, which the run writes over.
    """

    second: Tensor

    def __init__(self, rule: Any, dims: int, highest: int | None = None) -> None:
        self.rule = rule
        self.dims = dims
        self.highest = highest

    def __call__(self, *given: Tensor) -> Tensor:
        self.second = given[1].clone()
        out = self.rule(*given)
        name = getattr(self.rule, "__name__", type(self.rule).__name__)
        shape = given[0].shape[: self.dims]
        highest = given[0].shape[1] if self.highest is None else self.highest
        if not isinstance(out, Tensor) or out.shape != shape or out.dtype.is_floating_point:
            got = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"expected integers of shape {tuple(shape)} from {name}, got {got}; correct it")
        low, high = map(int, out.aminmax()) if out.numel() else (0, 0)
        if low < 0 or high > highest:
            raise ValueError(f"expected {name} to return values in [0, {highest}], got {low} to {high}; correct it")
        return out
