"""z-lab's published package (`dflash` 0.1.0) as a baseline, with the weights of our draft."""

from __future__ import annotations

import logging

from dflash_hf.bench.cells import Options
from dflash_hf.bench.methods import Models
from dflash_hf.bench.zlab import zlab_way

from .methods import Method, Raw, Settings
from .pair import Inputs, Pair

logger = logging.getLogger(__name__)


def zlab_method(pair: Pair) -> Method | None:
    """Returns z-lab's `dflash_generate` over the same weights, or `None`, with the reason logged."""
    models = Models(
        target=pair.target, processor=pair.processor or pair.tokenizer, draft=pair.draft
    )
    try:
        way = zlab_way(models)
    except ValueError as error:
        logger.warning("leaving out z-lab's package: %s", error)
        return None

    def run(pair: Pair, inputs: Inputs, settings: Settings) -> Raw:
        options = Options(
            max_new_tokens=settings.max_new_tokens, temperature=settings.temperature or 0.0
        )
        raw = way(models, inputs, options)
        [steps] = raw.steps
        return Raw(raw.sequences, (sum(steps["committed"]), len(steps["committed"])))

    return Method(name="zlab", run=run, batches=False)
