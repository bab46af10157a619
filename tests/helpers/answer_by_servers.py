"""`python answer_by_servers.py PROMPTS OUTPUT URL ...`: answers prompts through servers, to be killed meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_hf.training import OpenAIClient
from dflash_hf.training.answer_rows import RegenerateSettings
from dflash_hf.training.regenerate import regenerate
from helpers.templates import FAMILIES

if __name__ == "__main__":
    prompts, output, *urls = sys.argv[1:]
    settings = RegenerateSettings(
        prompts=Path(prompts), output=Path(output), max_new_tokens=20, batch_size=4
    )
    tokenizer = FAMILIES["smollm2"].tokenizer()
    regenerate(settings, [OpenAIClient(url) for url in urls], tokenizer)
