"""This module decodes step by step, to inspect steps or try other rules: `for step in iterate(target, draft, ...)`.

The run has the same preparation, prefill and step function as in `generate`, with a pause after each step. During a
pause, no hooks are set, and the models use their own attention.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf.devices import Inventory, eagerly, is_compiled
from dflash_hf.errors import require
from dflash_hf.generation.accept import BlockRule, stop_by_criteria
from dflash_hf.generation.candidate_generator import Propose
from dflash_hf.generation.checks import check_iterated, check_rules
from dflash_hf.generation.decode import keep_chooser, no_gradients
from dflash_hf.generation.generate import answer_with, unwrapped, unwrapped_target
from dflash_hf.generation.options import choose_widths
from dflash_hf.generation.prefill import prefill
from dflash_hf.generation.request import Request
from dflash_hf.generation.run import Run, look_at_models
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.step import step
from dflash_hf.generation.user_cache import NoUserCache
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.packed_weights import PackedWeights
from dflash_hf.undo import calling

# A caller's own rule, see [`iterate`]: it gets the proposals [B, W - 1], the target's tokens [B, W] and the target's
# logits [B, W, V], and returns the numbers of accepted proposals [B].
Accept = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DFlashStep:
    """Holds one step and its results, for `B` rows and `W` verified tokens. The tensors are on the target's device.

    All tensors are copies. Step 0 is the prefill. It commits one token, which is the target's own, and has no
    proposals (`W` is 1). Under `verify_width="auto"` and `num_tree_nodes="auto"`, every step has its own `W`.

    Args:
        index (`int`): The number of the step.
        anchor (`torch.Tensor` of shape `[B]`, int64): The committed token with which the block begins.
        proposals (`torch.Tensor` of shape `[B, W - 1]`, int64): The draft's proposals after the anchor.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): The target's token after the anchor and after each proposal.
            Under `proposal="sample"`, these are the tokens after rejection sampling: the proposals, and the redrawn
            token at `num_accepted`. With processors that read the prefix or synchronized rows (user-defined stopping
            criteria and processors), only the first tokens are chosen. Zeros or old tokens follow them.
        positions (`torch.Tensor` of shape `[B, W]`, int64): The index of each of `tokens` in its row, without padding.
        num_accepted (`torch.Tensor` of shape `[B]`, int64): The number of accepted proposals, before the commit is cut
            at an end token or a limit. It is 0 in rows that had ended before.
        committed (`list[torch.Tensor]`): The committed tokens `[n]` of each row, int64. They are empty in rows that
            had ended before.
        done (`torch.Tensor` of shape `[B]`, bool): Whether each row has ended, in this step or before.
        logits (`torch.Tensor` of shape `[B, W, V]`, *optional*): The target's unprocessed logits, with
            `output_logits`. The prefill has none.
        draft_logits (`torch.Tensor` of shape `[B, n, V]`, *optional*): The draft's logits, with `output_logits`. `n`
            is `W - 1`, or the number of all proposals of the block if a tree has more nodes.
        node_ids (`torch.Tensor` of shape `[B, W]`, int64, *optional*): Under `num_tree_nodes`, the tokens of the
            verified tree, the anchor first. `proposals`, `tokens` and `logits` are then those of the accepted path,
            and `proposals` are -1 after its end. Steps that verify a chain or one token have no such tensor.
        parents (`torch.Tensor` of shape `[B, W]`, int64, *optional*): The parent node of each of these nodes.
        hidden_states (`torch.Tensor` of shape `[B, W, L * D]`, *optional*): The tapped states of the anchor and the
            proposals, as the draft gets them, in the draft's dtype, with `output_hidden_states`. The prefill has none.
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
    """Decodes as `model.generate(**kwargs, assistant_model=draft)` does, one [`DFlashStep`] at a time.

    The checks and the prefill run at the call. Each verify runs when the next step is asked for. The committed tokens
    of all steps, joined row by row, are the new tokens of `generate`. The statistics in `draft.last_stats` are up to
    date at every pause, without the time spent in pauses. The iterator may be closed or dropped early without any
    clean-up.

    Args:
        model (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): Its draft.
        propose (callable, *optional*): A rule `propose(logits, anchor) -> proposals` instead of the draft's own rule.
            It gets the draft's logits `[B, W - 1, V]` and the token before them `[B]`, and returns int64 `[B, W - 1]`.
            The text is exact under any such rule. A DSpark draft's logits do not include its Markov head.
        accept (callable, *optional*): A rule `accept(proposals, tokens, logits) -> num_accepted` instead of the
            longest matching prefix. It gets the proposals `[B, W - 1]`, the target's tokens `[B, W]` and the target's
            unprocessed logits `[B, W, V]`, and returns integers `[B]` in `[0, W - 1]`. This number of proposals is
            committed, and then the target's token after them. A rule that keeps more than the matching prefix is
            lossy.
        output_logits, output_hidden_states (`bool`): Whether steps also hold logits, and tapped states. They cost
            memory.
        kwargs: The arguments of `generate`: inputs, settings, processors, criteria, streamer.

    Returns:
        An iterator of [`DFlashStep`]. Rows, dtypes and devices are as in `generate`.

    Raises:
        ValueError: If `generate` with a draft refuses the call, or if a cache is passed in. Also if a rule of the
            caller is used under `proposal="sample"` or `num_tree_nodes`, or returns another shape, dtype or range.
            Also if `accept` is used with processors that read the prefix, with criteria that are not known to be
            row-wise, or, with several rows, with any criteria or a streamer.
    """
    model = unwrapped_target(model)
    draft = unwrapped(draft)
    check_iterated(draft, kwargs)
    for name, rule in {"propose": propose, "accept": accept}.items():
        is_rule = rule is None or callable(rule)
        require(is_rule, f"{name} that can be called, or None", rule, "pass a function")
    # Checks and prefill run here and not in the generator, so that errors are raised at the call.
    start = functools.partial(_start, propose=propose, accept=accept)
    run = answer_with(start, cast(Any, model).generate, model, draft, kwargs)
    # The steps count in this object, so that the statistics are up to date at every pause.
    draft.last_stats = run.stats
    run.generator.iterated.keeps_logits = output_logits
    steps = _keeping_widths(run, _steps(run, output_logits, output_hidden_states))
    # The generator begins here, because one that never began would not run its `finally` when it is closed.
    next(steps)
    return steps


class CustomBlockRule(BlockRule):
    """Is a [`BlockRule`] in which a function of the caller chooses the number of accepted proposals; see `iterate`.

    Args:
        rule (`BlockRule`): The run's own rule, which this rule replaces.
        accept (callable): The caller's function.
    """

    def __init__(self, rule: BlockRule, accept: Accept) -> None:
        super().__init__(rule.processors, rule.criteria, rule.is_recorded)
        self.accept = accept
        # [B, W]: the target's own tokens for the last block, which the step shows to the user.
        self.tokens = torch.empty(0, dtype=torch.long, device="cpu")

    @property
    def runs_on_device(self) -> bool:
        """False, because the caller's function may read tensors on the host."""
        return False

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses as [`BlockRule.choose`] does. The caller's function returns the number of accepted proposals."""
        scores, _ = self._choose_block(state, logits_BWV)
        tokens = state.tokens
        self.tokens = tokens.clone()
        # Copies, because the caller's function may keep the tensors, and the next step overwrites both.
        found = self.accept(state.proposals.clone(), tokens.clone(), logits_BWV)
        # The caller's function may return a tensor on the host.
        num_accepted = found.to(tokens.device, torch.long)
        # Accepted proposals are committed whether or not they equal the target's tokens.
        place = torch.arange(state.width - 1, device=tokens.device)
        is_kept = place < num_accepted[:, None]
        tokens[:, :-1] = torch.where(is_kept, state.proposals, tokens[:, :-1])
        # Criteria are called last, because they must see the proposals that the caller's function accepts.
        if self.criteria:
            stop_by_criteria(state, self.criteria, num_accepted)
        return scores, num_accepted


def _start(
    request: Request, inputs: dict[str, Any], propose: Propose | None, accept: Accept | None
) -> Run:
    """Replaces `decode`: checks the caller's rules, and returns the run after its prefill."""
    check_rules(request, has_propose=propose is not None, has_accept=accept is not None)
    # A run may be left half-way, so that no cache is advanced and no buffers are taken from the pool.
    with eagerly(request.target.parts, request.draft_parts):
        run = prefill(request, inputs, NoUserCache(), is_looked_at=True)
    # There are no copies of weights, because the user may change weights in a pause.
    run.packed = PackedWeights(request.target.parts, is_on=False)
    if propose is not None:
        vocab_size = request.target.vocab_size
        run.generator.iterated.propose = _checked_propose(propose, vocab_size)
    if accept is not None:
        # `check_rules` has refused processors and criteria that need another rule.
        assert isinstance(run.rule, BlockRule)
        run.rule = CustomBlockRule(run.rule, _checked_accept(accept))
    # The run drafts at every step, so that each step shows proposals, unless the options ask for other widths. The
    # widths are chosen last, because this takes the chooser that an earlier run has left, and an error would lose it.
    options = request.draft.generation_config
    if options.asked_width is not None or options.num_tree_nodes == "auto":
        run.chooser = choose_widths(run.generator, run.state, run.keeps_buffers)
        run.watch.lap("rest")  # this does not count as time of a step
    return run


def _keeping_widths(run: Run, steps: Generator[DFlashStep]) -> Generator[Any]:
    """Yields `None`, then the steps of a run. At the end it keeps the run's chooser, also if the run ends early."""
    try:
        yield
        yield from steps
    finally:
        keep_chooser(run)


def _steps(run: Run, output_logits: bool, output_hidden_states: bool) -> Generator[DFlashStep]:
    """Yields the prefill, then one step after the other. During a pause, no hook and no mode is active."""
    state = run.state
    models = (run.request.target.parts, Inventory.of(run.generator.draft))
    # This is found once, because it reads every module of both models.
    compiled = [parts for parts in models if is_compiled(parts)]
    # The prefill counts as a step that has verified the prompts' last tokens.
    state.width = 1
    # The cursor is already after the first new token, so the columns of the prompts give the last prompt token.
    last_of_prompt = state.ids[:, state.host.columns - 1]
    yield _look(
        run, 0, last_of_prompt, state.lengths - 1, state.tokens, run.rows.reported.committed, {}
    )
    for index in itertools.count(1):
        if run.finished:
            break
        # The user may have changed modules and hooks in the pause.
        look_at_models(run)
        with (
            calling(),
            run.request.ranks.together(),
            eagerly(*compiled),
            no_gradients(run.request.target, _runs_user_code(run)),
        ):
            # The pause is the user's time and counts as no part of the run.
            run.watch.last = time.perf_counter()
            # Copies, because the commit changes these tensors, and the user sees the step as it was verified.
            anchor = state.anchor.clone()
            lengths = state.lengths.clone()
            logits, committed = step(run)
        optional: dict[str, Tensor] = {}
        if output_logits:
            optional["logits"] = state.along_path(logits).clone()
            # A block of one token is not drafted.
            draft_logits = run.generator.iterated.logits
            if draft_logits is not None:
                optional["draft_logits"] = draft_logits.clone()
        # Copies, because the next step writes into the same tensors.
        if output_hidden_states:
            states = run.generator.newest.states
            optional["hidden_states"] = states.to(state.ids.device, copy=True)
        if state.is_tree:
            # The block is already in the order of the path. The report has the tree as it was drafted.
            report = state.report
            optional["node_ids"] = report.node_ids.clone()
            optional["parents"] = report.parents.clone()
        tokens = state.tokens
        if isinstance(run.rule, CustomBlockRule):
            # `state.tokens` already has the accepted proposals in place of the target's tokens.
            tokens = run.rule.tokens
        yield _look(run, index, anchor, lengths, tokens, committed, optional)
    # The streamer of a run that the user leaves early is not ended, because such a run never gets here.
    if run.request.streamer is not None:
        run.request.streamer.end()


def _runs_user_code(run: Run) -> bool:
    """Returns True if user code runs within a step. A rule of the caller is user code too."""
    has_own_rule = run.generator.iterated.propose is not None or isinstance(
        run.rule, CustomBlockRule
    )
    return has_own_rule or run.request.runs_user_code


def _look(
    run: Run,
    index: int,
    anchor: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    num_committed: list[int],
    optional: dict[str, Tensor],
) -> DFlashStep:
    """Returns the [`DFlashStep`] of a step that has run.

    Args:
        run (`Run`): The run after the step.
        index (`int`): The number of the step.
        anchor, lengths (`torch.Tensor` of shape `[B]`, int64): The state's anchor and lengths before the step.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): The target's token after the anchor and each proposal.
        num_committed (`list[int]`): The number of tokens that each row has committed.
        optional (`dict[str, torch.Tensor]`): The fields that only some calls or steps have, by name.
    """
    state = run.state
    device = lengths.device
    committed: list[Tensor] = []
    for row, (end, num) in enumerate(zip(state.cursor.tolist(), num_committed, strict=True)):
        committed.append(state.ids[row, end - num : end].clone())
    # In a row that had ended before, proposals may match by chance, so its number is set to 0.
    is_idle = torch.tensor(num_committed, device=device) == 0
    # The copies are made outside inference mode, so that autograd accepts them.
    lengths = lengths.clone()
    return DFlashStep(
        index=index,
        anchor=anchor.clone(),
        proposals=state.proposals.clone(),
        tokens=tokens.clone(),
        positions=lengths[:, None] + torch.arange(1, state.width + 1, device=device),
        num_accepted=state.outcome[1].masked_fill(is_idle, 0),
        committed=committed,
        done=state.done.clone(),
        **optional,
    )


def _checked_propose(rule: Propose, vocab_size: int) -> Propose:
    """Returns a proposal rule that calls the user's rule, and checks its result: tokens `[B, W - 1]`."""

    def propose(logits: Tensor, anchor: Tensor) -> Tensor:
        proposals = rule(logits, anchor)
        # Other ids would be out of the range of the target's embedding.
        _check_integers(proposals, logits.shape[:2], vocab_size - 1, rule)
        return proposals

    return propose


def _checked_accept(rule: Accept) -> Accept:
    """Returns an acceptance rule that calls the user's rule, and checks its result: numbers of proposals `[B]`."""

    def accept(proposals: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        num_accepted = rule(proposals, tokens, logits)
        # A number above that of the proposals would commit tokens that were never verified.
        _check_integers(num_accepted, proposals.shape[:1], proposals.shape[1], rule)
        return num_accepted

    return accept


def _check_integers(found: Any, shape: torch.Size, highest: int, rule: Any) -> None:
    """Raises `ValueError` if a user's rule has not returned integers of this shape in `[0, highest]`."""
    name = getattr(rule, "__name__", type(rule).__name__)
    is_tensor = isinstance(found, Tensor)
    if not is_tensor or found.shape != shape or found.dtype.is_floating_point:
        got = type(found).__name__
        if is_tensor:
            got = f"{found.dtype} {tuple(found.shape)}"
        raise ValueError(
            f"expected integers of shape {tuple(shape)} from {name}, got {got}; correct it"
        )
    # A verify of one token has no proposals.
    if not found.numel():
        return
    low, high = map(int, found.aminmax())
    if low < 0 or high > highest:
        raise ValueError(
            f"expected {name} to return values in [0, {highest}], got {low} to {high}; correct it"
        )
