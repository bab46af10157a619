"""This module makes z-lab's package (`dflash` 0.1.0) a way of decoding, with our draft's weights.

No other module imports the package. It takes one text prompt at a time. Its statistics are cut at the end of an
answer. So for the last verify of an answer, only the committed tokens count as accepted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from dflash_hf.bench.cells import Options
from dflash_hf.bench.methods import Inputs, Models, Raw, Steps, Way, evenly
from dflash_hf.checkpoints.drafts import save_draft
from dflash_hf.errors import one_line
from dflash_hf.target_model.parts import end_tokens

PACKAGE = "dflash==0.1.0"


def zlab_way(models: Models) -> Way:
    """Returns z-lab's `dflash_generate` with the same weights, exported in z-lab's format and loaded by z-lab's class.

    Raises:
        ValueError: If the package is not installed, or if z-lab's format cannot express the draft.
    """
    try:
        from dflash import model as zlab  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"expected z-lab's package for zlab, got none ({one_line(error)}); pip install --no-deps {PACKAGE}"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        save_draft(models.loaded_draft, folder, format="zlab")
        loaded: Any = zlab.DFlashDraftModel.from_pretrained(folder, dtype=models.target.dtype)
    draft = loaded.to(models.target.device).eval()
    package: Any = zlab
    # z-lab's clock waits for CUDA, which may not be there.
    clock: Callable[[], float] = (
        package._cuda_time if models.target.device.type == "cuda" else time.perf_counter
    )

    def decode(models: Models, inputs: Inputs, options: Options) -> Raw:
        package._cuda_time = clock
        ids = inputs["input_ids"]
        if set(inputs) != {"input_ids", "attention_mask"} or ids.shape[0] != 1:
            raise ValueError(
                f"expected one row of text for zlab, got {ids.shape[0]} with {sorted(inputs)}; leave images out"
            )
        out = package.dflash_generate(
            draft,
            models.target,
            ids,
            options.max_new_tokens,
            end_tokens(models.target) or None,
            temperature=options.temperature,
            top_p=options.top_p,
            block_size=options.block_size,
            return_stats=True,
        )
        assert isinstance(out.output_ids, torch.Tensor)
        committed = [int(number) for number in out.acceptance_lengths]
        block = options.block_size or int(draft.block_size)
        left = options.max_new_tokens
        proposed: list[int] = []
        for number in committed:
            proposed.append(min(block, left) - 1)
            left -= number
        accepted = [number - 1 for number in committed]
        steps: Steps = {"committed": committed, "accepted": accepted, "proposed": proposed}
        decode_seconds = float(out.time_per_output_token) * int(out.num_output_tokens)
        return Raw(
            sequences=out.output_ids,
            ttft=float(out.time_to_first_token),
            step_ms=evenly(decode_seconds, len(committed)),
            steps=[steps],
        )

    return decode
