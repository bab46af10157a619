"""Decoding one verify at a time, to look at it and to try other rules: `for step in iterate(target, draft, ...)`.

The run is `generate`'s own: the same preparation, prefill and step function, with a pause after each step. Nothing is
held during a pause: no hook, no switched attention.
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
from dflash_hf.generation.generate import answer_with, unwrapped
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

# See [`iterate`]: proposals [B, W - 1], the target's tokens [B, W] and logits [B, W, V] -> number accepted [B].
Accept = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DFlashStep:
    """One step and its results, for `B` rows and `W` verified tokens. The tensors are copies on the target's device.

    Step 0 is the prefill: it commits one token of the target's own and has no proposals (`W` is 1). Under
    `verify_width="auto"` and `num_tree_nodes="auto"` every step has its own `W`.

    Args:
        index (`int`): Number of the step.
        anchor (`torch.Tensor` of shape `[B]`, int64): The committed token that the block begins with.
        proposals (`torch.Tensor` of shape `[B, W - 1]`, int64): The draft's proposals after it.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): The target's token after the anchor and after each proposal.
            Under `proposal="sample"`, the tokens that rejection sampling left: the proposals, and at `num_accepted`
            the redrawn token. With processors that read the prefix, or if rows advance together (user-defined
            stopping criteria and processors), only the chosen tokens; zeros or old tokens follow them.
        positions (`torch.Tensor` of shape `[B, W]`, int64): Index of each of `tokens` in its row, padding not counted.
        num_accepted (`torch.Tensor` of shape `[B]`, int64): Proposals that stand, before any cut; 0 in finished rows.
        committed (`list[torch.Tensor]`): Per row, the tokens that were committed `[n]`, int64; empty in finished rows.
        done (`torch.Tensor` of shape `[B]`, bool): Rows that have finished, this step included.
        logits (`torch.Tensor` of shape `[B, W, V]`, *optional*): The target's, unprocessed; with `output_logits`, not
            of the prefill.
        draft_logits (`torch.Tensor` of shape `[B, n, V]`, *optional*): The draft's, with `output_logits`; `n` is
            `W - 1`, or all proposals of the block if a tree has more nodes.
        node_ids (`torch.Tensor` of shape `[B, W]`, int64, *optional*): Under `num_tree_nodes`, the tokens of the tree
            that was verified, the anchor first. `proposals`, `tokens` and `logits` are those of the path that was
            accepted, and `proposals` are -1 after its end. Steps that verify a chain or one token have none.
        parents (`torch.Tensor` of shape `[B, W]`, int64, *optional*): Which node each of them follows.
        hidden_states (`torch.Tensor` of shape `[B, W, L * D]`, *optional*): Tapped states of the anchor and the
            proposals, as the draft gets them, in its dtype; with `output_hidden_states`, not of the prefill.
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
            text exact. A DSpark draft's logits come without what its Markov head adds.
        accept (callable, *optional*): `accept(proposals, tokens, logits) -> num_accepted` instead of the longest
            matching prefix: proposals `[B, W - 1]`, the target's tokens `[B, W]` and its unprocessed logits
            `[B, W, V]` to integers `[B]` in `[0, W - 1]`. This number of proposals is committed, and then the target's
            token after them. A rule that keeps more than the matching prefix is lossy.
        output_logits, output_hidden_states (`bool`): Also return logits, and tapped states. They cost memory.
        kwargs: Arguments of `generate`: inputs, settings, processors, criteria, streamer.

    Returns:
        An iterator of [`DFlashStep`]; rows, dtypes and devices as in `generate`.

    Raises:
        ValueError: If `generate` with a draft refuses the call; for a rule of one's own under `proposal="sample"` or
            `num_tree_nodes`; for `accept` beside processors that read the prefix, criteria that are not known to be
            row-wise, or, with several rows, any criteria or a streamer; for rules that return another shape, dtype or
            range; for a cache that is passed in.
    """
    draft = unwrapped(draft)
    check_iterated(draft, kwargs)
    for name, rule in {"propose": propose, "accept": accept}.items():
        is_rule = rule is None or callable(rule)
        require(is_rule, f"{name} that can be called, or None", rule, "pass a function")
    # Checks and prefill run here and not in the generator: an error is raised at the call.
    start = functools.partial(_start, propose=propose, accept=accept)
    run = answer_with(start, cast(Any, model).generate, model, draft, kwargs)
    # The object that the steps go on counting in, so that statistics are up to date at every pause.
    draft.last_stats = run.stats
    run.generator.iterated.keeps_logits = output_logits
    steps = _keeping_widths(run, _steps(run, output_logits, output_hidden_states))
    # Begun here: closing or dropping a generator that was never begun runs nothing of it.
    next(steps)
    return steps


class CustomBlockRule(BlockRule):
    """A [`BlockRule`] in which a function of the caller says how many proposals stand; see `iterate`.

    Args:
        rule (`BlockRule`): The run's own rule, in whose place this one stands.
        accept (callable): The caller's function.
    """

    def __init__(self, rule: BlockRule, accept: Accept) -> None:
        super().__init__(rule.processors, rule.criteria, rule.is_recorded)
        self.accept = accept
        # [B, W]: the target's own tokens for the last block, for whoever looks at the step.
        self.tokens = torch.empty(0, dtype=torch.long, device="cpu")

    @property
    def runs_on_device(self) -> bool:
        """False: the caller's function may look at anything."""
        return False

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses as [`BlockRule.choose`]."""
        scores, _ = self._choose_block(state, logits_BWV)
        tokens = state.tokens
        self.tokens = tokens.clone()
        # Copies: the caller's function may keep what it gets, and both are written again.
        found = self.accept(state.proposals.clone(), tokens.clone(), logits_BWV)
        # The caller's function may count on the host.
        num_accepted = found.to(tokens.device, torch.long)
        # Accepted proposals are committed whether or not they equal the target's tokens.
        place = torch.arange(state.width - 1, device=tokens.device)
        is_kept = place < num_accepted[:, None]
        tokens[:, :-1] = torch.where(is_kept, state.proposals, tokens[:, :-1])
        # Criteria see what the caller's function keeps: they are asked behind it.
        if self.criteria:
            stop_by_criteria(state, self.criteria, num_accepted)
        return scores, num_accepted


def _start(
    request: Request, inputs: dict[str, Any], propose: Propose | None, accept: Accept | None
) -> Run:
    """Stands where `decode` stands, and returns after the prefill."""
    check_rules(request, has_propose=propose is not None, has_accept=accept is not None)
    # A run may be left half-way, so that no cache is advanced and no buffers are taken from the pool.
    with eagerly(request.target.parts, request.draft_parts):
        run = prefill(request, inputs, NoUserCache(), is_looked_at=True)
    # The user may change weights in a pause.
    run.packed = PackedWeights(request.target.parts, is_on=False)
    if propose is not None:
        vocab_size = request.target.vocab_size
        run.generator.iterated.propose = _checked_propose(propose, vocab_size)
    if accept is not None:
        # Processors and criteria that want another rule were refused beside a rule of the caller's.
        assert isinstance(run.rule, BlockRule)
        run.rule = CustomBlockRule(run.rule, _checked_accept(accept))
    # To be looked at, a run drafts at every step, unless another width is asked for. At the end: an error before it
    # leaves the widths that an earlier run has kept.
    options = request.draft.generation_config
    if options.asked_width is not None or options.num_tree_nodes == "auto":
        run.chooser = choose_widths(run.generator, run.state, run.keeps_buffers)
        run.watch.lap("rest")  # no step's time
    return run


def _keeping_widths(run: Run, steps: Generator[DFlashStep]) -> Generator[Any]:
    """Yields nothing, then the steps of a run, and keeps its widths, also where it is left half-way."""
    try:
        yield
        yield from steps
    finally:
        keep_chooser(run)


def _steps(run: Run, output_logits: bool, output_hidden_states: bool) -> Generator[DFlashStep]:
    """Yields the prefill, then one step after the other; nothing is held while it waits."""
    state = run.state
    models = (run.request.target.parts, Inventory.of(run.generator.draft))
    # Looked up once: every part of both models has to be asked.
    compiled = [parts for parts in models if is_compiled(parts)]
    # The prefill counts as a step that has verified the prompts' last tokens.
    state.width = 1
    # The cursor stands behind the first token by now.
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
            # The pause is the user's time, and counts for no part of the run.
            run.watch.last = time.perf_counter()
            # Copies of what the commit moves on: a step is shown as it was verified.
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
            # The block is in the order of the path by now; the report has the tree as it was drafted.
            report = state.report
            optional["node_ids"] = report.node_ids.clone()
            optional["parents"] = report.parents.clone()
        tokens = state.tokens
        if isinstance(run.rule, CustomBlockRule):
            # By now the accepted proposals stand in `state.tokens`.
            tokens = run.rule.tokens
        yield _look(run, index, anchor, lengths, tokens, committed, optional)
    # A run that is left half-way never gets here: its streamer is not ended.
    if run.request.streamer is not None:
        run.request.streamer.end()


def _runs_user_code(run: Run) -> bool:
    """Returns True if code of the user's runs within a step: a rule of the caller's is some too."""
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
    """Returns a step that has run as the user gets it.

    Args:
        run (`Run`): The run, behind the step.
        index (`int`): Number of the step.
        anchor, lengths (`torch.Tensor` of shape `[B]`, int64): The state's, before the step.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): The target's token after the anchor and each proposal.
        num_committed (`list[int]`): Tokens that each row has committed.
        optional (`dict[str, torch.Tensor]`): Fields that only some calls or steps have, by name.
    """
    state = run.state
    device = lengths.device
    committed: list[Tensor] = []
    for row, (end, num) in enumerate(zip(state.cursor.tolist(), num_committed, strict=True)):
        committed.append(state.ids[row, end - num : end].clone())
    # A row that had ended before has matching proposals by chance.
    is_idle = torch.tensor(num_committed, device=device) == 0
    # Copied outside inference mode, so that autograd takes the copies.
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
    """Returns a proposal rule of the user with its results checked: tokens `[B, W - 1]`."""

    def propose(logits: Tensor, anchor: Tensor) -> Tensor:
        proposals = rule(logits, anchor)
        # Other ids would be looked up in the target's embedding, out of its range.
        _check_integers(proposals, logits.shape[:2], vocab_size - 1, rule)
        return proposals

    return propose


def _checked_accept(rule: Accept) -> Accept:
    """Returns an acceptance rule of the user with its results checked: numbers of proposals `[B]`."""

    def accept(proposals: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        num_accepted = rule(proposals, tokens, logits)
        # More than there are proposals would commit what was never verified.
        _check_integers(num_accepted, proposals.shape[:1], proposals.shape[1], rule)
        return num_accepted

    return accept


def _check_integers(found: Any, shape: torch.Size, highest: int, rule: Any) -> None:
    """Raises `ValueError` unless a user's rule has returned integers of this shape in `[0, highest]`."""
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
