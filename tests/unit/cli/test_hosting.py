# SPDX-License-Identifier: Apache-2.0
"""What is refused before processes are started: the keys are those of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli.hosting import Site, require_fit, site_here
from tandem.config.overrides import load_config
from tandem.config.pools import place_run, place_sft
from tandem.config.run import RunConfig
from tandem.config.sft import SftConfig
from tandem.config.validate import check_run
from tandem.errors import UserError
from tandem.models.folder import ModelFolder, check_folder
from tandem.platforms.record import CPU
from tandem.runtime.cluster import ClusterPlan, ClusterSettings

CLUSTER = ClusterPlan("local", ClusterSettings(1, 2))
TWO = "trainer.n_gpus_per_node=2"


def run_site(*arguments: str) -> Site:
    config = load_config(RunConfig, [TWO, *arguments]).config
    placement = place_run(config)
    platforms = {pool.name: CPU for pool in placement.used_pools}
    return Site(config, platforms, placement, CLUSTER)


def sft_site(*arguments: str) -> Site:
    config = load_config(SftConfig, [TWO, *arguments]).config
    placement = place_sft(config)
    platforms = {pool.name: CPU for pool in placement.used_pools}
    return Site(config, platforms, placement, CLUSTER)


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        ("auto", "pools of npu, cpu, npu in this order: those of npu must follow each other"),
        ("flagcx", "FlagCX connects devices, and a pool is on the host"),
    ],
)
def test_what_auto_finds_is_judged_as_if_it_were_written(
    transport: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    groups = "[[actor-train],[generate],[logp]]"
    if transport == "flagcx":
        groups = "[[actor-train],[logp],[generate]]"
    config = load_config(
        RunConfig,
        [
            "trainer.n_gpus_per_node=4",
            f"trainer.separated_node_tasks={groups}",
            "trainer.separated_node_ratios=[0.5,0.25,0.25]",
            "pools.actor-train.platform=npu",
            "pools.logp.platform=npu",
            f"pools.transport={transport}",
        ],
    ).config
    check_run(config)
    with pytest.raises(UserError, match=message):
        site_here(config)


@pytest.fixture
def foreign(tmp_path: Path) -> ModelFolder:
    """A model that transformers' code computes."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return check_folder(str(tmp_path), load_weight=False)


def test_a_model_that_cannot_be_spread_is_named_by_the_commands_key(foreign: ModelFolder) -> None:
    for site, key in ((run_site(), "actor_rollout_ref.model.path"), (sft_site(), "model.path")):
        with pytest.raises(UserError, match=f"^{key}='{foreign.path}': .*cannot be spread"):
            require_fit(site, foreign, key=key)


def test_a_layout_that_does_not_divide_is_named_by_the_commands_key(
    tiny_policy_folder: Path,
) -> None:
    """The model has one key/value head."""
    folder = check_folder(str(tiny_policy_folder))
    size = "tensor_model_parallel_size=2"
    actor = f"actor_rollout_ref.actor.fsdp_config.{size}"
    for site, setting in ((run_site(actor), actor), (sft_site(f"engine.{size}"), f"engine.{size}")):
        with pytest.raises(UserError, match=f"^{setting}: it must divide"):
            require_fit(site, folder, key="")
