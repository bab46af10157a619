"""Chat templates as the large families write them, over a tokenizer of single bytes with the family's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}{%- set thoughts = '' %}
{%- if '</think>' in m.content %}
{%- set thoughts = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
SMOLLM2 = """{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{'<|im_start|>' + m['role'] + '
' + m['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
LLAMA3 = """{{- bos_token }}{%- for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{{- bos_token }}{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- '[INST] ' + m['content'] + ' [/INST]' }}
{%- else %}{{- ' ' + m['content'] + eos_token }}{%- endif %}{%- endfor %}"""
# As DeepSeek-R1's: thoughts are asked for, and never written.
THOUGHTLESS = """{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}
{{- '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A template, the tokens that are special in it, and what ends an answer."""

    template: str
    special: tuple[str, ...]
    eos: str
    end: str
    bos: str | None = None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer of single bytes with this template."""
        return byte_tokenizer(self.template, self.special, self.eos, self.bos)


FAMILIES = {
    "qwen3": Family(
        template=QWEN3,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        end="<|im_end|>",
    ),
    "smollm2": Family(
        template=SMOLLM2, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>", end="<|im_end|>"
    ),
    "llama3": Family(
        template=LLAMA3,
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        eos="<|eot_id|>",
        end="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "gemma": Family(
        template=GEMMA,
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        end="<end_of_turn>",
        bos="<bos>",
    ),
    "mistral": Family(
        template=MISTRAL,
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        eos="</s>",
        end="</s>",
        bos="<s>",
    ),
}


def byte_tokenizer(
    template: str | None, special: tuple[str, ...], eos: str, bos: str | None = None
) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes with special tokens and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        pad_token=special[0],
        extra_special_tokens=list(special),
    )
    found.chat_template = template
    return found
