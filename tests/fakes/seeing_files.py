# SPDX-License-Identifier: Apache-2.0
"""A folder with a tiny model that sees and a tokenizer, and rows with pictures."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

from PIL import Image

from tandem.data.files import write_parquet
from tandem.quickstart.seeing_model import VISION_TOKENS, write_seeing_model
from tandem.quickstart.tokenizer import (
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    save_tokenizer,
    train_tokenizer,
)

RUN_KEYS = (
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "trainer.val_before_train=False",
    "trainer.total_training_steps=2",
    "trainer.device=cpu",
    "trainer.logger=[]",
    "custom_reward_function.path=pkg://tests.fakes.rewards",
    "custom_reward_function.name=graded",
)
"""The keys of two small steps of GRPO over these rows."""


def write_policy(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """Write a random model that sees, with its tokenizer."""
    folder.mkdir(parents=True)
    special = (*SPECIAL_TOKENS, *VISION_TOKENS)
    tokenizer = train_tokenizer(["how many shapes? 0123456789"], special_tokens=special)
    save_tokenizer(tokenizer, folder)
    ids = {token: special.index(token) for token in VISION_TOKENS} | {"eos": END_ID, "pad": PAD_ID}
    num_tokens = tokenizer.get_vocab_size()
    write_seeing_model(folder, family, num_tokens=num_tokens, ids=ids, seed=0)
    return folder


def png(width: int = 24, height: int = 24, *, seed: int = 0, mode: str = "RGB") -> bytes:
    """Return a picture of random colours in PNG."""
    stream = io.BytesIO()
    size = len(mode) * width * height
    Image.frombytes(mode, (width, height), random.Random(seed).randbytes(size)).save(stream, "PNG")
    return stream.getvalue()


def row_of(*pictures: Any, text: str | None = None, index: int = 0) -> dict[str, Any]:
    """Return a row of verl's schema with pictures."""
    content = "<image>" * len(pictures) + "how many?" if text is None else text
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "images": list(pictures),
        "reward_model": {"style": "rule", "ground_truth": str(index % 10)},
        "extra_info": {"index": index},
    }


def write_rows(path: Path, count: int) -> Path:
    """Write rows with one picture each, every third with two, and one without."""
    rows = []
    for i in range(count):
        number = 0 if i == 1 else 2 if i % 3 == 2 else 1
        pictures = [{"bytes": png(24, 16 + 8 * (i % 3), seed=10 * i + k)} for k in range(number)]
        rows.append(row_of(*pictures, index=i))
    write_parquet(rows, path, key="test")
    return path
