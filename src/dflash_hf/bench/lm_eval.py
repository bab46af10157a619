"""lm-eval's tasks, answered with a draft: its `hf` model, whose `generate` gets `assistant_model=`.

    python -m dflash_hf.bench.lm_eval --model dflash-hf --model_args pretrained=X,draft=Y --tasks gsm8k --batch_size 8

is lm-eval's own command line, with this model in its registry. The releases of lm-eval up to 0.4.13 know no models but
their own; later ones find this one by its entry point, so that there `lm_eval --model dflash-hf ...` is all one types.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dflash_hf.drafts import load_draft
from dflash_hf.modeling_dflash import DFlashDraftModel

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models import huggingface
except ModuleNotFoundError as error:
    raise ImportError(
        f"expected lm-eval for its tasks, got no module {error.name}; pip install 'dflash-hf[lm-eval]'"
    ) from error

HFLM: Any = huggingface.HFLM  # for type checkers its decorator leaves no more than lm-eval's interface


class DFlashLM(HFLM):
    """lm-eval's model of Transformers, which answers `generate_until` with a draft.

    What is only scored (`loglikelihood`) the target does alone. lm-eval's stopping criteria look at all rows of a
    at once, so rows advance together: the texts are those of `hf`, and a batch accepts less per verify than each row
    alone would.

    Args:
        pretrained (`str` or `PreTrainedModel`): The target.
        draft (`str` or `DFlashDraftModel`, *optional*): Its draft; a folder's or the Hub's is loaded in the target's
            dtype, onto its device. Without one this is `hf`.
        kwargs: All other arguments of lm-eval's `hf`.

    Raises:
        ValueError: If the draft cannot be loaded. One that is not the target's is refused by the first `generate`.
    """

    def __init__(self, pretrained: Any, draft: str | DFlashDraftModel | None = None, **kwargs: Any) -> None:
        super().__init__(pretrained, **kwargs)
        if isinstance(draft, str):
            draft = load_draft(draft, dtype=self.model.dtype, device_map={"": self.model.device})
        self.draft = draft

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        if self.draft is not None:
            generation_kwargs["assistant_model"] = self.draft
        return super()._model_generate(context, max_length, stop, **generation_kwargs)


def main() -> None:
    """Runs lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


__all__ = ["DFlashLM", "main"]

if __name__ == "__main__":
    # The registry takes one class under a name, and that is this module's, not its second one in __main__.
    from dflash_hf.bench import lm_eval as registered

    registered.main()
else:
    register_model("dflash-hf")(DFlashLM)
