# SPDX-License-Identifier: Apache-2.0
"""A tiny model that was fine-tuned on a few conversations until it repeats them, calls and all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.parse.overrides import load_config
from tandem.config.schema.sft import SftConfig
from tandem.driver import sft
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tests.fakes.calculator_run import write_materials

Conversation = Mapping[str, Any]


def conversation(
    question: str, name: str, *, arguments: Mapping[str, Any], result: str, answer: str
) -> Conversation:
    """Return a question that is answered after one call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages}


def write_calling_model(folder: Path, conversations: Sequence[Conversation]) -> Path:
    """Make the model in ``folder`` and fine-tune it; return the folder of the result."""
    materials = write_materials(folder)
    rows = folder / "conversations.jsonl"
    rows.write_text("".join(json.dumps(one) + "\n" for one in conversations) * 4)
    keys = (
        f"model.path={materials.model}",
        f"data.train_files={rows}",
        "data.multiturn.enable=True",
        "data.max_length=256",
        f"data.train_batch_size={4 * len(conversations)}",
        "engine.dtype=float32",
        "optim.lr=0.01",
        f"trainer.default_local_dir={folder / 'sft'}",
        "trainer.total_training_steps=60",
        "trainer.total_epochs=60",
        "trainer.save_freq=-1",
        "trainer.device=cpu",
        "trainer.logger=[]",
    )
    tuning = load_config(SftConfig, list(keys)).config
    assert run_prepared(local_site(tuning), sft.prepare(tuning)).exit_code == 0
    return folder / "sft/global_step_60/actor"
