"""This module applies logits processors to the draft's logits, if the processors declare that this is useful.

For example, a form of the answer may allow only a few tokens at each place, and the draft does not know this form. So
the logits of each slot go through the same processors that the target's logits will go through, after the proposals of
the slots before. The target still decides, so this does not change the text.

Shapes: `B` rows, `D` slots that propose, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf.draft_model.dspark import Behind
from dflash_hf.generation.sampling import BlockProcessors, NoiseKey, choose, of_vocabulary
from dflash_hf.generation.state import DecodeState


def shaped(
    state: DecodeState,
    logits_BDV: Tensor,
    processors: BlockProcessors,
    key: NoiseKey | None,
    positions_BD: Tensor,
    behind: Behind,
) -> Tensor:
    """Returns the draft's logits `[B, D, V]` after the processors that shape proposals; reads on the host.

    The allowed tokens of a slot depend on the tokens before it. For the branches of a tree too, these are taken to be
    the likeliest tokens of a chain.

    Args:
        state (`DecodeState`): The state, which is only read.
        logits_BDV (`torch.Tensor`): The draft's logits, which are not changed.
        processors (`BlockProcessors`): The processors of the run.
        key (`NoiseKey`, *optional*): Key of the noise that chooses proposals. Without it, the likeliest tokens are
            chosen.
        positions_BD (`torch.Tensor`): Positions of the proposed tokens, int64.
        behind (callable): Adds the scores that depend on the token before a slot, for drafts with a Markov head. These
            scores are not in the returned logits.
    """
    # A copy is changed, because a recorder of the step gets the draft's own logits.
    logits_BDV = logits_BDV.clone()
    # A processor gets only the row's text, without the scratch memory after it. So the host needs its length.
    lengths = state.cursor.tolist()
    has_ended = state.done.tolist()
    for row in range(len(lengths)):
        # A step commits nothing in a row that has ended, so its proposals do not matter.
        if has_ended[row] or not processors.shapes(row):
            continue
        one = slice(row, row + 1)
        of_key = None if key is None else key.of_rows(one)
        # The prefix is copied, because a processor may keep it, and these columns are written again.
        prefix = state.ids[one, : lengths[row]].clone()
        for slot in range(logits_BDV.shape[1]):
            # Processors get float32, as for the target's tokens.
            scores = processors.shape(row, prefix, logits_BDV[one, slot].float())
            scores = of_vocabulary(scores, 1, logits_BDV.shape[-1])
            # A draft with a reduced vocabulary may have none of the allowed tokens.
            if bool(scores.isneginf().all()):
                break
            logits_BDV[one, slot] = scores.to(logits_BDV.dtype)
            # The processors of the next slot read this token, which is the expected proposal of this slot.
            at = positions_BD[one, slot : slot + 1]
            token = choose(behind(scores[:, None], prefix[:, -1:]), of_key, at)
            prefix = torch.cat([prefix, token], dim=1)
    return logits_BDV
