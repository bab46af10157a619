"""This module reads the continuations of a verify's tree that were tried but not taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

MAX_BRANCHES = 5  # how many branches of a verify are shown
# Number of tokens that are decoded before a continuation, because its text may depend on the tokens before it.
CONTEXT = 8
BROKEN = "\ufffd"  # tokenizers write this for bytes that are not a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A continuation that a verify checked but did not take."""

    after: int  # how many tokens of the same verify come before it
    text: str
    from_text: bool  # whether an earlier part of the text suggested it, and not the draft


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried:
    """All that a verify of a tree has tried beside the tokens it committed. Hashed by identity, for caches."""

    branches: list[Branch]  # the most likely ones, by their first token
    num_more: int  # how many other continuations there are
    # Accepted proposals of the draft, counted from the first one that was not the draft's first choice.
    num_off_branch: int


class VerifiedTree(NamedTuple):
    """The tree of one verify of one row, and the path that was accepted in it; see [`TreeReport`]."""

    path: list[int]
    node_ids: list[int]
    parents: list[int]
    sources: list[int]

    def read(self, before: list[int], num_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Tried:
        """Returns the continuations that were not taken.

        `before` are tokens before the verify, at least the last ones. The verify committed `num_tokens`. Continuations
        after a cut are left out, because there is no text beside them.
        """
        found = [
            nodes
            for nodes in self.not_taken()
            if self.path.index(self.parents[nodes[0]]) < num_tokens
        ]
        branches: list[Branch] = []
        for nodes in found[:MAX_BRANCHES]:
            after = self.path.index(self.parents[nodes[0]])
            shared = (before + [self.node_ids[node] for node in self.path[1 : after + 1]])[
                -CONTEXT:
            ]
            text = _text_behind(shared, [self.node_ids[node] for node in nodes], tokenizer)
            branches.append(Branch(after=after, text=text, from_text=bool(self.sources[nodes[0]])))
        return Tried(
            branches=branches,
            num_more=len(found) - len(branches),
            num_off_branch=self.num_off_branch(),
        )

    def not_taken(self) -> list[list[int]]:
        """Returns the nodes of each continuation, from the node where it leaves the path to a leaf.

        Nodes are in the order of the probability of their paths. So continuations with a more likely first token come
        first.
        """
        inner = set(self.parents)
        on_path = {0, *self.path}
        found: list[list[int]] = []
        for leaf in range(1, len(self.parents)):
            if leaf not in inner and leaf not in on_path:
                nodes = [leaf]
                while self.parents[nodes[-1]] not in on_path:
                    nodes.append(self.parents[nodes[-1]])
                found.append(nodes[::-1])
        return sorted(found, key=lambda nodes: (nodes[0], nodes[-1]))

    def num_off_branch(self) -> int:
        """Counts the draft's nodes on the path, from the first one that had a more likely sibling."""
        accepted = [node for node in self.path if node]
        for depth, node in enumerate(accepted):
            earlier = zip(self.parents[1:node], self.sources[1:node], strict=True)
            if not self.sources[node] and (self.path[depth], 0) in earlier:
                return sum(not self.sources[later] for later in accepted[depth:])
        return 0


def _text_behind(before: list[int], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text that tokens add. Special tokens appear by name, and tokens without a text by number."""
    given = str(tokenizer.decode(before)).rstrip(BROKEN)
    return str(tokenizer.decode(before + ids))[len(given) :] or " ".join(
        f"#{number}" for number in ids
    )
