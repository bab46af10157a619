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
            self._found[key] = self._find(ring, num_columns, device)
        return self._found[key]

    def _find(self, ring: int, num_columns: int, device: torch.device) -> slice | tuple[Tensor | None, Tensor]:
        positions = self.positions[:, self.positions.shape[1] - num_columns :]
        if num_columns:
            # As many indices as columns: none is missing, and they count up by one.
            first = int(positions[0, 0])
            last = int(positions[0, -1])
            is_run = first >= 0 and last - first == num_columns - 1 and first // ring == last // ring
            if is_run and (len(positions) == 1 or bool((positions == positions[0]).all())):
                return slice(first % ring, last % ring + 1)
        kept = (positions >= 0) & (positions > positions.amax(dim=1, keepdim=True) - ring)
        slots = positions % ring + torch.arange(len(positions), device="cpu")[:, None] * ring
        if bool(kept.all()):
            return None, slots.flatten().to(device)
        return kept.flatten().nonzero()[:, 0].to(device), slots[kept].to(device)
