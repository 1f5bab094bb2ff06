# SPDX-License-Identifier: Apache-2.0
"""A small byte-level tokenizer for any chat template, with the template's own special tokens."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandem.data.tokenizer import TextCodec

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = re.compile(
    r"<\|[^|<>\s']{1,40}\|>|<\uff5c[^<>\s']{1,40}\uff5c>|</?tool_call>|</?tool_response>|</?think>"
    r"|<(?:start|end)_of_turn>|<\|?tool_\w+\|?>|\[/?INST\]|</?s>|\[gMASK\]|<sop>"
    r"|</?(?:TOOLCALL|TOOL_RESPONSE)>"
)
CLOSES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|call|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""The tokens that close a turn in some template; the first one that a template has is its end."""
OPENS = ("<|observation|>", "<|user|>", "</s>")
"""Tokens on which a model may stop because they open the next message."""


@cache
def codec_for(name: str) -> TextCodec:
    """Return a codec with the template ``name``."""
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    return make_codec(source)


def make_codec(source: str) -> TextCodec:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(set(SPECIAL.findall(source)) | {"</s>"})
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([source, "the answer is 42 because " * 3], trainer)
    end = next((token for token in CLOSES if token in special), "</s>")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        bos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = source
    ends = [tokenizer.token_to_id(token) for token in (*CLOSES, *OPENS) if token in special]
    return TextCodec(fast, eos_ids=tuple(sorted(ends)))
