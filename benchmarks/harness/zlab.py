"""z-lab's published package (`dflash` 0.1.0) as a baseline, with the weights of our draft; imported here only."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from dflash_hf.drafts import save_draft

from .methods import Method, Raw, Settings
from .pair import Inputs, Pair

PACKAGE = "dflash==0.1.0"
logger = logging.getLogger(__name__)


def zlab_method(pair: Pair) -> Method | None:
    """Returns z-lab's `dflash_generate` over the same weights, or `None`, with the reason logged, where it is absent.

    The draft goes through our export in their layout, and is loaded by their class.
    """
    try:
        from dflash import model as zlab
    except ImportError as error:
        logger.warning("leaving out z-lab's package (%s): pip install --no-deps %s", error, PACKAGE)
        return None
    with tempfile.TemporaryDirectory() as folder:
        save_draft(pair.draft, folder, format="zlab")
        loaded: Any = zlab.DFlashDraftModel.from_pretrained(folder, dtype=pair.target.dtype)
    draft = loaded.to(pair.device).eval()
    clock: Callable[[], float] = zlab._cuda_time if pair.device.type == "cuda" else time.perf_counter

    def run(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
        # Their clock waits for CUDA, which is not there on a CPU.
        zlab._cuda_time = clock
        out = zlab.dflash_generate(
            draft,
            pair.target,
            inputs["input_ids"],
            settings.max_new_tokens,
            pair.eos_ids() or None,
            temperature=settings.temperature or 0.0,
            return_stats=True,
        )
        assert isinstance(out.output_ids, torch.Tensor)
        return Raw(out.output_ids, (sum(out.acceptance_lengths), len(out.acceptance_lengths)))

    return Method(name="zlab", run=run, batches=False)
