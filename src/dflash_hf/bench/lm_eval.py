"""lm-eval's tasks, answered with a draft: its `hf` model, whose `generate` gets `assistant_model=`.

    python -m dflash_hf.bench.lm_eval --model dflash-hf --model_args pretrained=X,draft=Y --tasks gsm8k --batch_size 8

is lm-eval's own command line, with this model in its registry. The releases of lm-eval up to 0.4.13 know no models but
their own; later ones find this one by its entry point, so that there `lm_eval --model dflash-hf ...` is all one types.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from dflash_hf.checkpoints.drafts import load_draft
from dflash_hf.modeling_dflash import DFlashDraftModel

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models import huggingface
except ModuleNotFoundError as error:
    raise ImportError(
        f"expected lm-eval for its tasks, got no module {error.name}; pip install 'dflash-hf[lm-eval]'"
    ) from error

# For type checkers its decorator leaves no more than lm-eval's interface
HFLM: Any = huggingface.HFLM


class StopTexts(StoppingCriteria):
    """Stops a row once it has said one of some texts.

    lm-eval's own criteria keep a list of rows that have stopped and end the call with the last of them; what a row
    says behind a text is cut off afterwards. This one needs no such list, so rows need not wait for each other.

    Args:
        tokenizer: What decodes.
        texts (`list[str]`): The texts.
        num_columns (`int`): Columns of the prompts, which are not looked at.
    """

    is_row_wise = True

    def __init__(self, tokenizer: Any, texts: list[str], num_columns: int) -> None:
        self.tokenizer = tokenizer
        self.texts = [text for text in texts if text]
        self.num_columns = num_columns
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in self.texts]
        # Two more: a text may be written in other tokens than its own
        self.num_last = 2 + max(lengths, default=0)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Returns which rows stop `[B]`; `input_ids` are the tokens so far `[B, T]`."""
        stops = [self._is_said(row) for row in input_ids[:, self.num_columns :].tolist()]
        return cast(torch.BoolTensor, torch.tensor(stops, device=input_ids.device))

    def _is_said(self, ids: list[int]) -> bool:
        # The last tokens alone may be decoded otherwise than behind what comes before them, and save decoding all.
        decoded = (self.tokenizer.decode(part) for part in (ids[-self.num_last :], ids))
        return all(any(text in said for text in self.texts) for said in decoded)


class DFlashLM(HFLM):
    """lm-eval's model of Transformers, which answers `generate_until` with a draft.

    What is only scored (`loglikelihood`) the target does alone. Texts are those of `hf`, at every batch size. With
    `think_end_token`, where `hf` stops depends on the other rows of a batch: there lm-eval's own criteria are used,
    under which rows advance together, and a batch accepts less per verify.

    Args:
        pretrained (`str` or `PreTrainedModel`): The target.
        draft (`str` or `DFlashDraftModel`, *optional*): Its draft; a folder's or the Hub's is loaded in the target's
            dtype, onto its device. Without one this is `hf`.
        kwargs: All other arguments of lm-eval's `hf`.

    Raises:
        ValueError: If the draft cannot be loaded. One that is not the target's is refused by the first `generate`.
    """

    def __init__(
        self, pretrained: Any, draft: str | DFlashDraftModel | None = None, **kwargs: Any
    ) -> None:
        super().__init__(pretrained, **kwargs)
        if isinstance(draft, str):
            draft = load_draft(draft, dtype=self.model.dtype, device_map={"": self.model.device})
        self.draft = draft

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        if self.draft is None:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        generation_kwargs["assistant_model"] = self.draft
        # For stop strings of the target's `generation_config`
        generation_kwargs["tokenizer"] = self.tokenizer
        if self.think_end_token is not None:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        if not generation_kwargs.get("do_sample"):
            generation_kwargs["do_sample"] = False
            # lm-eval says 0 for greedy, Transformers warns of it
            generation_kwargs.pop("temperature", None)
        criteria = StoppingCriteriaList([StopTexts(self.tokenizer, stop, context.shape[1])])
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            return self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=criteria,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                **generation_kwargs,
            )


def main() -> None:
    """Runs lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    # The registry takes one class under a name, and that is this module's, not its second one in __main__.
    from dflash_hf.bench import lm_eval as registered

    registered.main()
else:
    register_model("dflash-hf")(DFlashLM)
