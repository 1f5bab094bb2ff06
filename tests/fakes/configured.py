# SPDX-License-Identifier: Apache-2.0
"""Configurations of runs as their arguments make them, and sizes of models."""

from __future__ import annotations

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.derived.sizes import ModelSizes
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig

SIZES = ModelSizes(
    num_layers=24,
    hidden=896,
    inner=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    vocabulary=151936,
    tied=False,
)
"""Qwen2.5-0.5B's, but for a head of its own."""

TINY = ModelSizes(
    num_layers=2,
    hidden=64,
    inner=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocabulary=512,
    tied=True,
)

IN_TURNS = (
    "trainer.async_pipeline=True",
    "trainer.generate_ahead_steps=1",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
)
"""The keys of an asynchronous run whose devices train and generate in turns."""


def config(*arguments: str) -> RunConfig:
    """What ``arguments`` ask for."""
    return load_config(RunConfig, arguments).config


def reasons(*arguments: str) -> dict[str, str]:
    """Why keys of ``arguments`` are without effect, by key."""
    return dict(ignored_keys(load_config(RunConfig, arguments)))
