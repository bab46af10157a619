"""The tree of a block's most likely paths, and of what followed the text's last tokens before, in one launch."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..operation import Given, Sizes, check_dtype, operation

# Ancestors are bits of an int64.
MAX_NODES = 64
# What every level of a path costs beside its probability, so that no child ranks with its parent where the draft is
# sure of it; and the least log-probability that counts, below which float32 would lose that difference.
LEVEL, LEAST = 1e-4, -20.0
# How much it counts against what a text has said before that the draft is sure of another token: the exponent of what
# its first choice leaves open.
DOUBT = 0.5
INTEGERS = ("order_BDSR", "nodes_XBN", "block_BN", "candidates_BDC", "ids_BT", "cursor_B")


def num_paths(depth: int, num_ranks: int) -> int:
    """Returns how many paths of one to `depth` tokens there are if each is one of `num_ranks`."""
    return sum(num_ranks**length for length in range(1, depth + 1))


def _check(given: Given, size: Sizes) -> None:
    check_dtype(given, (torch.int64,), *INTEGERS)
    check_dtype(given, (torch.float32,), "log_probs_BDSR", "follows_FM")
    for name in ("log_probs_BDSR", "order_BDSR", "candidates_BDC"):
        if given[name] is not None and not given[name].is_contiguous():
            raise ValueError(f"expected {name} to be contiguous, got strides {given[name].stride()}; copy it")
    for name in ("nodes_XBN", "block_BN", "ids_BT", "follows_FM"):
        if given[name] is not None and given[name].stride(-1) != 1:
            strides = given[name].stride()
            raise ValueError(f"expected {name} with unit stride in its last dimension, got {strides}; copy it")
    if size["X"] != 3 or not 2 <= size["N"] <= min(MAX_NODES, num_paths(size["D"], size["R"]) + 1):
        raise ValueError(
            f"expected nodes_XBN [3, B, N] with N from 2 to {MAX_NODES} and to one more than there are paths of "
            f"{size['R']} ranks over {size['D']} levels, got {list(given['nodes_XBN'].shape)}; pass fewer nodes"
        )
    if size["S"] != size.get("C", 1):
        raise ValueError(
            f"expected a state per candidate, or one without any, got {size['S']} of them; pass candidates_BDC of both"
        )
    is_given = [name for name in ("ids_BT", "cursor_B", "follows_FM") if given[name] is not None]
    if 0 < len(is_given) < 3:
        raise ValueError(f"expected ids_BT, cursor_B and follows_FM, got {' and '.join(is_given)}; pass all or none")


@operation(check=_check, mutates=("nodes_XBN", "block_BN"))
def build_tree(
    log_probs_BDSR: Tensor,
    order_BDSR: Tensor,
    nodes_XBN: Tensor,
    block_BN: Tensor,
    candidates_BDC: Tensor | None = None,
    ids_BT: Tensor | None = None,
    cursor_B: Tensor | None = None,
    follows_FM: Tensor | None = None,
) -> None:
    """Builds the tree of each row's `N - 1` most likely paths behind the anchor, in place; no host sync.

    A path is a rank at each of its levels. With `cost = max(log_prob, -20) - 1e-4` a level, its total is

        total(r_1 ... r_d) = cost[0, 0, r_1] + cost[1, order[0, 0, r_1], r_2] + ...

    where the state that a level is in is the candidate before it, and always 0 without candidates. A path has

        (r_1 + 1) + (r_1 + 1)(r_2 + 1) + ...

    others, itself included, that are no longer and rank nowhere lower; only one with `N - 1` or fewer is considered.
    Without candidates that changes nothing: those others are as likely.

    What followed the last tokens of a row when they stood in it before is a path too, of as many tokens as there are:
    behind the latest of those columns that share the most last tokens with the end, `m` of them. Its first `k` tokens
    have the total `follows[0, m] + follows[1, m] (k - 1) - 1e-4 k`, or that of the same path by ranks if it is
    considered and greater. From the token on that leaves the path of first ranks, by then no longer than `N - 1`,
    `log(1 - exp(cost)) / 2` is added, of that path's cost at this level.

    Nodes stand in falling order of their totals, of which equal ones may come in any; node 0 is the anchor.

    Args:
        log_probs_BDSR (`torch.Tensor` of shape `[B, D, S, R]`, float32): The greatest log-probabilities at each
            position, in each state, falling.
        order_BDSR (`torch.Tensor` of shape `[B, D, S, R]`, int64): Whose they are: a candidate's index or, without
            candidates, a token.
        nodes_XBN (`torch.Tensor` of shape `[3, B, N]`, int64): Gets parents, depths and ancestors of the nodes: bit
            `i` of the latter is the node `i` itself, or one on the way to it. The anchor is its own parent.
        block_BN (`torch.Tensor` of shape `[B, N]`, int64): Gets their tokens; the anchor's stays.
        candidates_BDC (`torch.Tensor` of shape `[B, D, C]`, int64, *optional*): Tokens, `C = S`, where what is likely
            depends on the token before.
        ids_BT (`torch.Tensor` of shape `[B, T]`, int64, *optional*): The rows' texts.
        cursor_B (`torch.Tensor` of shape `[B]`, int64, *optional*): The column behind each row's last token.
        follows_FM (`torch.Tensor` of shape `[2, M + 1]`, float32, *optional*): Log-probability that a text goes on as
            it did before, by one token and by each further one, by how many of its last tokens are the same; `M` are
            compared.

    Raises:
        ValueError: If shapes, dtypes or strides are not as said, or there are fewer paths than nodes.
    """
    (batch, depth, num_states, num_ranks), num_nodes = log_probs_BDSR.shape, block_BN.shape[1]
    paths = paths_of(num_nodes, depth, num_ranks, log_probs_BDSR.device)
    costs = log_probs_BDSR.clamp_min(LEAST) - LEVEL
    tokens = order_BDSR
    if candidates_BDC is not None:
        choices = candidates_BDC[:, :, None].expand(-1, -1, num_states, -1)
        tokens, order = choices.gather(-1, order_BDSR), nn.functional.pad(order_BDSR.flatten(1), (0, 1))
        at, levels = order.new_zeros(batch, len(paths.depths)), list[Tensor]()
        for level in range(depth):
            pair = (level * num_states + at) * num_ranks + paths.ranks[:, level]
            levels.append(pair.where(paths.depths > level, depth * num_states * num_ranks))
            at = order.gather(1, levels[-1])
        index = torch.stack(levels, dim=-1).flatten(1)
    else:
        index = paths.index.expand(batch, -1)
    shape = (batch, *paths.ranks.shape)
    costs = nn.functional.pad(costs.flatten(1), (0, 1)).gather(1, index).view(shape)
    totals = costs.sum(dim=-1)
    tokens = nn.functional.pad(tokens.flatten(1), (0, 1), value=-1).gather(1, index).view(shape)
    ends = (paths.depths - 1)[:, None].expand(batch, -1, 1)
    last, depths, prefixes = tokens.gather(2, ends)[..., 0], paths.depths.expand(batch, -1), paths.prefixes
    prefixes = prefixes.expand(batch, -1, -1)
    if ids_BT is not None and cursor_B is not None and follows_FM is not None:
        text, its_totals = continuation(ids_BT, cursor_B, depth, follows_FM)
        its_totals = its_totals + _doubt(costs[:, paths.first], tokens[:, paths.first], text)
        totals, more = _with_continuation(totals, tokens, paths, text, its_totals)
        levels = torch.arange(1, depth + 1, device=text.device).expand(batch, -1)
        last, depths, prefixes = (torch.cat(pair, 1) for pair in ((last, text), (depths, levels), (prefixes, more)))
    _select(totals, last, depths, prefixes, paths, nodes_XBN, block_BN)


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The paths that are considered, `P` of them, as tensors of a device; parents stand before their children.

    Args:
        ranks (`torch.Tensor` of shape `[P, D]`, int64): 0 behind a path's end.
        index (`torch.Tensor` of shape `[P * D]`, int64): Where they are in one state's `[D * R]`, and `D * R` behind a
            path's end.
        depths (`torch.Tensor` of shape `[P]`, int64): Tokens of each.
        prefixes (`torch.Tensor` of shape `[P, D]`, int64): The paths that each begins with, level by level, itself
            included; `P + D` is the anchor, behind its end: up to there continuations are counted.
        powers (`torch.Tensor` of shape `[N]`, int64): Each node's bit, and 0 for the anchor's.
        first (`int`): The longest path of first ranks.
    """

    ranks: Tensor
    index: Tensor
    depths: Tensor
    prefixes: Tensor
    powers: Tensor
    first: int


@functools.lru_cache(maxsize=16)
def paths_of(num_nodes: int, depth: int, num_ranks: int, device: torch.device) -> Paths:
    """Returns the paths that a tree is chosen among; the same for the same arguments, because they take a while.

    Steps that are captured copy nothing from the host, so that something else has to ask for them first.
    """
    paths = considered(num_nodes, depth, num_ranks)
    place, levels = {path: index for index, path in enumerate(paths)}, range(1, depth + 1)
    beyond, root = depth * num_ranks, len(paths) + depth

    def tensor(values: object) -> Tensor:
        return torch.tensor(values, device="cpu").to(device)

    index = [[n * num_ranks + path[n] if n < len(path) else beyond for n in range(depth)] for path in paths]
    prefixes = [[place[path[:end]] if end <= len(path) else root for end in levels] for path in paths]
    return Paths(
        ranks=tensor([[*path, *[0] * (depth - len(path))] for path in paths]),
        index=tensor(index).flatten(),
        depths=tensor([len(path) for path in paths]),
        prefixes=tensor(prefixes),
        powers=tensor([0, *(1 << node if node < 63 else -(1 << 63) for node in range(1, num_nodes))]),
        first=place[(0,) * min(depth, num_nodes - 1)],
    )


def considered(num_nodes: int, depth: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Returns the paths that are considered, as the rank of each level: of 16 nodes and 15 levels 321."""
    found: list[tuple[int, ...]] = []
    level: list[tuple[tuple[int, ...], int, int]] = [((), 1, 0)]
    for _ in range(depth):
        longer = [
            ((*path, rank), product * (rank + 1), total + product * (rank + 1))
            for path, product, total in level
            for rank in range(min(num_ranks, (num_nodes - 1 - total) // product))
        ]
        found += [path for path, _, _ in longer]
        level = longer
    return found


def continuation(ids_BT: Tensor, cursor_B: Tensor, depth: int, follows_FM: Tensor) -> tuple[Tensor, Tensor]:
    """Finds what followed the last tokens of each row before; arguments as [`build_tree`]. No host sync.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Its tokens `[B, depth]`, and the total up to each of them, `-inf` where
        there is nothing.
    """
    num_columns, device = ids_BT.shape[1], ids_BT.device
    columns, last = torch.arange(num_columns, device=device), cursor_B[:, None] - 1
    num_same = torch.zeros_like(ids_BT)
    goes_on = columns < last  # what is compared ends before the row's last token
    for back in range(min(follows_FM.shape[1] - 1, num_columns)):
        ending = ids_BT.gather(1, (last - back).clamp_min(0))
        earlier = nn.functional.pad(ids_BT, (back, 0), value=-1)[:, :num_columns]
        goes_on = goes_on & (earlier == ending) & (last >= back)
        num_same = num_same + goes_on
    # The latest of the longest: a later column counts for less than one more token.
    best = (num_same * num_columns + columns).masked_fill(num_same == 0, -1).argmax(dim=1, keepdim=True)
    same = num_same.gather(1, best)
    first, further = follows_FM[:, same]
    levels = torch.arange(1, depth + 1, device=device)
    totals, at = first + further * (levels - 1) - LEVEL * levels, best + levels
    return ids_BT.gather(1, at.clamp_max(num_columns - 1)), totals.masked_fill((at > last) | (same == 0), -torch.inf)


def _doubt(costs_BD: Tensor, tokens_BD: Tensor, text_BD: Tensor) -> Tensor:
    """What is added to a continuation's totals `[B, D]`, by costs and tokens of the longest path of first ranks."""
    differs = (text_BD != tokens_BD) & (tokens_BD >= 0)
    leaves = differs & (differs.cumsum(dim=1) == 1)
    return torch.where(leaves, DOUBT * torch.log1p(-costs_BD.exp()), 0.0).cumsum(dim=1)


def _with_continuation(
    totals_BP: Tensor, tokens_BPD: Tensor, paths: Paths, text_BD: Tensor, its_totals_BD: Tensor
) -> tuple[Tensor, Tensor]:
    """Puts a continuation's paths behind the others: totals `[B, P + D]`, and their prefixes `[B, D, D]`.

    One that is considered anyhow is that one, as likely as the more likely of the two. The others hang on the last one
    that is.
    """
    batch, num, depth = tokens_BPD.shape
    levels = torch.arange(1, depth + 1, device=text_BD.device)
    is_same = ((tokens_BPD == text_BD[:, None]) | (tokens_BPD < 0)).all(dim=-1)  # [B, P]
    # At most one path of each length is the same.
    same = (is_same[:, :, None] & (paths.depths[:, None] == levels)).to(torch.long)  # [B, P, D]
    has_same, index = same.amax(dim=1).bool(), same.argmax(dim=1)
    its = its_totals_BD.to(totals_BP.dtype)
    raised = torch.where(is_same, its.gather(1, (paths.depths - 1).expand(batch, -1)), -torch.inf)
    path = torch.where(has_same, index, num + levels - 1)
    prefixes = torch.where(levels <= levels[:, None], path[:, None], num + depth)
    return torch.cat([torch.maximum(totals_BP, raised), its.masked_fill(has_same, -torch.inf)], dim=1), prefixes


def _select(
    totals_BC: Tensor,
    last_BC: Tensor,
    depths_BC: Tensor,
    prefixes_BCD: Tensor,
    paths: Paths,
    nodes_XBN: Tensor,
    block_BN: Tensor,
) -> None:
    """Makes a tree of the best paths, by their totals, last tokens, depths and prefixes."""
    chosen = totals_BC.topk(block_BN.shape[1] - 1, dim=1).indices
    # Where in the tree each path stands; the anchor, which is beyond all paths, at 0.
    place = chosen.new_zeros(len(chosen), sum(paths.ranks.shape) + 1)
    place.scatter_(1, chosen, torch.arange(1, block_BN.shape[1], device=chosen.device).expand_as(chosen))
    depths, index = depths_BC.gather(1, chosen), chosen[..., None].expand(-1, -1, prefixes_BCD.shape[-1])
    on_path = place.gather(1, prefixes_BCD.gather(1, index).flatten(1)).view_as(index)
    parents = on_path.gather(2, (depths - 2).clamp_min(0)[..., None])[..., 0]
    nodes_XBN[0].zero_()[:, 1:] = parents * (depths > 1)
    nodes_XBN[1].zero_()[:, 1:] = depths
    nodes_XBN[2].fill_(1)[:, 1:] = paths.powers[on_path].sum(dim=-1) + 1
    block_BN[:, 1:] = last_BC.gather(1, chosen)


__all__ = ["MAX_NODES", "build_tree", "continuation", "num_paths", "paths_of"]
