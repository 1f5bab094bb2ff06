# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with a chat template and a random Qwen2 model as one small Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from tandem.quickstart.model import ModelSize, write_model
from tandem.quickstart.tokenizer import END_ID, PAD_ID, save_tokenizer, train_tokenizer
from tandem.quickstart.word_problems import WORD_PROBLEMS, correct

TINY = ModelSize(hidden=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate=64)


def write_tiny_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level BPE of some 400 entries with a ChatML template, saved into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = WORD_PROBLEMS.draw(200, seed=1)
    texts = [f"{problem.question}\n{correct(problem)}" for problem in problems]
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, folder)
    return tokenizer


def write_tiny_policy(folder: Path, *, seed: int = 0, size: ModelSize = TINY) -> Path:
    """Tokenizer and model together; returns the folder."""
    tokenizer = write_tiny_tokenizer(folder)
    write_model(
        folder,
        num_tokens=tokenizer.get_vocab_size(),
        eos_id=END_ID,
        pad_id=PAD_ID,
        seed=seed,
        size=size,
    )
    return folder


def write_tiny_gpt2(folder: Path) -> Path:
    """The same tokenizer with a random GPT-2, a family that our decoder does not compute."""
    tokenizer = write_tiny_tokenizer(folder)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=2,
        eos_token_id=END_ID,
        bos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
