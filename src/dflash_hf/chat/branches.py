"""What a verify has tried and not taken: the continuations of its tree that leave the text which was accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

MAX_BRANCHES = 5  # that are shown of a verify
# Tokens before a continuation that its text is read with: one may depend on those before it
CONTEXT = 8
BROKEN = "\ufffd"  # what tokenizers show for bytes that are no character


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A continuation that a verify looked at and did not take."""

    after: int  # tokens of the same verify that it follows
    text: str
    from_text: bool  # there because the text had gone on like that before, and not by the draft


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried:
    """What a verify of a tree has tried beside what it wrote; hashed as the object that it is, for caches."""

    branches: list[Branch]  # the most likely ones, by their first token
    num_more: int  # continuations beyond those
    # Accepted proposals of the draft, from the first one on that was not its first choice
    num_off_branch: int


class VerifiedTree(NamedTuple):
    """The tree of one verify of one row, and how far it went; see [`TreeReport`]."""

    path: list[int]
    node_ids: list[int]
    parents: list[int]
    sources: list[int]

    def read(self, before: list[int], num_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Tried:
        """Reads its continuations; `before` are the tokens before the verify's, the last ones or more.

        It committed `num_tokens`: behind a cut there is nothing to be beside.
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
        """Returns the nodes of each continuation, from where it leaves the path to a leaf.

        Nodes stand in the order of their paths' probability: those with the more likely first token come first.
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
        """Counts the draft's nodes on the path, from the first one on that it had a more likely sibling for."""
        accepted = [node for node in self.path if node]
        for depth, node in enumerate(accepted):
            earlier = zip(self.parents[1:node], self.sources[1:node], strict=True)
            if not self.sources[node] and (self.path[depth], 0) in earlier:
                return sum(not self.sources[later] for later in accepted[depth:])
        return 0


def _text_behind(before: list[int], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that tokens add, special ones by their names, and numbers for those without any."""
    given = str(tokenizer.decode(before)).rstrip(BROKEN)
    return str(tokenizer.decode(before + ids))[len(given) :] or " ".join(
        f"#{number}" for number in ids
    )
