"""The draft's logits as processors of the request leave them, where these say that it is worth it.

A form of the answer allows few tokens at each place, and the draft knows nothing of it. So the logits of each slot go
through the same processors as the target's will, behind the proposals before it. The target decides as ever: what is
proposed changes no text.

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
    """Returns the draft's logits `[B, D, V]` behind the processors that shape proposals; reads on the host.

    What a slot may propose depends on the tokens before it. These are taken to be the likeliest ones of a chain, for
    the branches of a tree too.

    Args:
        state (`DecodeState`): Read only.
        logits_BDV (`torch.Tensor`): The draft's; not changed.
        processors (`BlockProcessors`): The run's.
        key (`NoiseKey`, *optional*): Of the noise that chooses proposals; without it they are the likeliest tokens.
        positions_BD (`torch.Tensor`): Positions of the proposed tokens, int64.
        behind (callable): Adds what the token before a slot says, for drafts with a Markov head; it is not in the
            logits that are returned.
    """
    # A copy: whoever looks at the step sees the draft's own logits.
    logits_BDV = logits_BDV.clone()
    # A processor gets the row's text alone, without the scratch behind it, so that the host needs its length.
    lengths = state.cursor.tolist()
    has_ended = state.done.tolist()
    for row in range(len(lengths)):
        # A step commits nothing in a row that has ended, whatever it proposes.
        if has_ended[row] or not processors.shapes(row):
            continue
        one = slice(row, row + 1)
        of_key = None if key is None else key.of_rows(one)
        # A copy: a processor may keep what it gets, and the columns are written again.
        prefix = state.ids[one, : lengths[row]].clone()
        for slot in range(logits_BDV.shape[1]):
            # Processors get float32, as they do for the target's tokens.
            scores = processors.shape(row, prefix, logits_BDV[one, slot].float())
            scores = of_vocabulary(scores, 1, logits_BDV.shape[-1])
            # A draft of a reduced vocabulary may have none of the tokens that are left.
            if bool(scores.isneginf().all()):
                break
            logits_BDV[one, slot] = scores.to(logits_BDV.dtype)
            # The next slot's processors read this token: what the slot will propose, as far as is known.
            at = positions_BD[one, slot : slot + 1]
            token = choose(behind(scores[:, None], prefix[:, -1:]), of_key, at)
            prefix = torch.cat([prefix, token], dim=1)
    return logits_BDV
