"""This module answers lm-eval's tasks with a draft: it is lm-eval's `hf` model with `assistant_model=` in `generate`.

    python -m dflash_hf.bench.lm_eval --model dflash-hf --model_args pretrained=X,draft=Y --tasks gsm8k --batch_size 8

is lm-eval's own command line, with this model in its registry. Releases of lm-eval up to 0.4.13 know only their own
models. Later releases find this model by its entry point, so that `lm_eval --model dflash-hf ...` is enough.
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

# With lm-eval's decorator, type checkers see only lm-eval's interface.
HFLM: Any = huggingface.HFLM


class StopTexts(StoppingCriteria):
    """Stops a row once its answer contains one of some texts.

    lm-eval's own criteria keep a list of rows that have stopped, and end the call with the last row. Text after a stop
    is cut off later. This class needs no such list, so rows need not wait for each other.

    Args:
        tokenizer: The tokenizer that decodes the answer.
        texts (`list[str]`): The stop texts.
        num_columns (`int`): Columns of the prompts, which are not searched.
    """

    is_row_wise = True

    def __init__(self, tokenizer: Any, texts: list[str], num_columns: int) -> None:
        self.tokenizer = tokenizer
        self.texts = [text for text in texts if text]
        self.num_columns = num_columns
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in self.texts]
        # Two tokens more, because an answer may write a text in other tokens.
        self.num_last = 2 + max(lengths, default=0)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Returns which rows stop, `[B]`. `input_ids` `[B, T]` are the tokens so far."""
        stops = [self._is_said(row) for row in input_ids[:, self.num_columns :].tolist()]
        return cast(torch.BoolTensor, torch.tensor(stops, device=input_ids.device))

    def _is_said(self, ids: list[int]) -> bool:
        # The last tokens come first, because they are cheap to decode. Their text may differ without the tokens
        # before.
        decoded = (self.tokenizer.decode(part) for part in (ids[-self.num_last :], ids))
        return all(any(text in said for text in self.texts) for said in decoded)


class DFlashLM(HFLM):
    """lm-eval's `hf` model, which answers `generate_until` with a draft.

    The target alone computes `loglikelihood`. Texts are the same as those of `hf`, at every batch size. With
    `think_end_token`, the place where `hf` stops depends on the other rows of a batch. Then lm-eval's own criteria are
    used. With these criteria rows advance together, so a batch accepts fewer tokens per verify.

    Args:
        pretrained (`str` or `PreTrainedModel`): The target.
        draft (`str` or `DFlashDraftModel`, *optional*): Its draft. A folder or Hub id is loaded in the target's dtype
            onto the target's device. Without a draft, this is `hf`.
        kwargs: All other arguments of lm-eval's `hf`.

    Raises:
        ValueError: If the draft cannot be loaded. A draft for another target is refused by the first `generate`.
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
        # `generate` needs it for stop strings of the target's `generation_config`.
        generation_kwargs["tokenizer"] = self.tokenizer
        if self.think_end_token is not None:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        if not generation_kwargs.get("do_sample"):
            generation_kwargs["do_sample"] = False
            # lm-eval passes 0 for greedy decoding, and Transformers warns about it.
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
    # The registry takes one class per name. This must be the class of the imported module, not the one of __main__.
    from dflash_hf.bench import lm_eval as registered

    registered.main()
else:
    register_model("dflash-hf")(DFlashLM)
