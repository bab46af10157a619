"""Where the columns of left-padded prompts go in buffers that have a ring of slots per row."""

from __future__ import annotations

import torch
from torch import Tensor


class PromptSlots:
    """Where whole prompts go in buffers of a ring per row; found once per kind of layer, and on the host.

    Args:
        positions_BS (`torch.Tensor` of shape `[B, S]`, int64): Index in its row of each token; negative: nowhere.
    """

    def __init__(self, positions_BS: Tensor) -> None:
        self.positions = positions_BS.cpu()
        self._found: dict[tuple[int, int, torch.device], slice | tuple[Tensor | None, Tensor]] = {}

    def of(self, ring: int, num_columns: int, device: torch.device) -> slice | tuple[Tensor | None, Tensor]:
        """Returns where the newest columns go in a buffer `[B * ring, ...]`, those that fit in.

        That is, as indices into columns and buffer of all rows, one after another, `[N]` each, which columns are kept
        (`None` is all) and their slots; or the slots of every row, where all rows have the same ones in a run.
        """
        key = (ring, num_columns, device)
        if key not in self._found:
            positions = self.positions[:, self.positions.shape[1] - num_columns :]
            kept = (positions >= 0) & (positions > positions.amax(dim=1, keepdim=True) - ring)
            slots = positions % ring
            run = slots[0, 0] + torch.arange(num_columns, device="cpu") if num_columns else slots[0]
            rows = torch.arange(len(slots), device="cpu")[:, None] * ring
            if not bool(kept.all()):
                self._found[key] = kept.flatten().nonzero()[:, 0].to(device), (slots + rows)[kept].to(device)
            elif num_columns and bool((slots == run).all()):
                self._found[key] = slice(int(run[0]), int(run[-1]) + 1)
            else:
                self._found[key] = None, (slots + rows).flatten().to(device)
        return self._found[key]


__all__ = ["PromptSlots"]
