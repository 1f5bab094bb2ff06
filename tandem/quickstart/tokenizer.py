# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE tokenizer in Qwen2's form, saved for Hugging Face.

It has NFC, Qwen2's splitting pattern (each digit alone) and a ChatML template; ``<|im_end|>`` ends
a response and ``<|endoftext|>`` pads. Training takes a tenth of a second, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

PAD = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
PAD_ID = SPECIAL_TOKENS.index(PAD)
END_ID = SPECIAL_TOKENS.index(TURN_END)
ROLES = ("system", "user", "assistant")
MAX_VOCAB = 512

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message['content'] }}"
    "{{ '\n</tool_response><|im_end|>\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen's form of calls and results. The tools are not described: the model knows the only one."""


def train_tokenizer(
    texts: Iterable[str], *, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """Train a tokenizer of at most ``MAX_VOCAB`` entries, the bytes included.

    Special tokens take the first ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *ROLES], trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, chat_template: str = CHAT_TEMPLATE
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": PAD,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
