# SPDX-License-Identifier: Apache-2.0
"""A18: what is written for Megatron's transformer reaches MindSpeed before groups are formed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.config.check.rules import unbuilt_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.engines.mindspeed import start_megatron
from tandem.errors import UserError

KEY = "actor_rollout_ref.actor.strategy"
MEGATRON = "actor_rollout_ref.actor.megatron"
ARGUMENTS = [
    f"{KEY}=megatron",
    f"+{MEGATRON}.override_transformer_config.use_flash_attn=True",
    f"+{MEGATRON}.override_transformer_config.recompute_method=uniform",
    f"{MEGATRON}.context_parallel_size=2",
    f"{MEGATRON}.tensor_model_parallel_size=4",
]


@pytest.fixture
def vendor_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for MindSpeed and Megatron, gone again afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "fakes/mindspeed_path")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mindspeed", "megatron"):
            del sys.modules[name]


@pytest.mark.usefixtures("vendor_packages")
def test_a18_settings_reach_mindspeed_before_groups_are_formed() -> None:
    config = load_config(RunConfig, ARGUMENTS).config.actor_rollout_ref.actor.megatron
    told = start_megatron(config, key=KEY)
    (first, settings), (second, sizes) = importlib.import_module("mindspeed.megatron_adaptor").CALLS
    assert (first, second) == ("repatch", "groups")
    assert (
        settings
        == told
        == {
            "context_parallel_size": 2,
            "use_flash_attn": True,
            "recompute_method": "uniform",
        }
    )
    assert (sizes["context_parallel_size"], sizes["tensor_model_parallel_size"]) == (2, 4)


def test_a18_a_missing_package_is_named() -> None:
    config = load_config(RunConfig, ARGUMENTS).config.actor_rollout_ref.actor.megatron
    with pytest.raises(UserError, match=f"{KEY}=megatron: on this platform it takes .*mindspeed"):
        start_megatron(config, key=KEY)


def test_a18_the_strategy_is_refused_until_there_is_an_engine() -> None:
    config = load_config(RunConfig, ARGUMENTS).config
    assert any(f"{KEY}='megatron': is not built yet" in line for line in unbuilt_run(config))
