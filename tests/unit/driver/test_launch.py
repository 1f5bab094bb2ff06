# SPDX-License-Identifier: Apache-2.0
"""What is refused before processes are started: the keys are those of the command."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from tandem.config.check.device_rules import require_division
from tandem.config.check.read_conditions import ONE_PROCESS
from tandem.config.check.rules import check_run
from tandem.config.derived.pools import place_run, place_sft
from tandem.config.derived.sizes import ModelSizes
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver import launch
from tandem.driver.launch import RunSite, fitted, local_site, run_on_site
from tandem.errors import UserError
from tandem.models.families import decoder_config
from tandem.models.folder import ModelFolder, check_folder
from tandem.models.parallel import check_layout
from tandem.platforms.record import CPU
from tandem.runtime.cluster import ClusterPlan, ClusterSettings

CLUSTER = ClusterPlan("local", ClusterSettings(1, 2))
TWO = "trainer.n_gpus_per_node=2"


def run_site(*arguments: str) -> RunSite:
    config = load_config(RunConfig, [TWO, *arguments]).config
    placement = place_run(config)
    platforms = {pool.name: CPU for pool in placement.used_pools}
    return RunSite(config, platforms, placement, CLUSTER)


def sft_site(*arguments: str) -> RunSite:
    config = load_config(SftConfig, [TWO, *arguments]).config
    placement = place_sft(config)
    platforms = {pool.name: CPU for pool in placement.used_pools}
    return RunSite(config, platforms, placement, CLUSTER)


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
        local_site(config)


def test_a_run_of_one_process_says_that_it_joins_no_cluster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(RunConfig, ["trainer.device=cpu"]).config
    for address, expected in (("", []), ("127.0.0.1:1", [f"RAY_ADDRESS: {ONE_PROCESS}"])):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert run_on_site(config, lambda site: 5) == 5
        assert [text.removeprefix("without effect: ") for text in caplog.messages] == expected


@pytest.mark.parametrize(
    ("arguments", "cores", "number"),
    [
        (["trainer.n_gpus_per_node=3"], 2, 3),
        (["trainer.n_gpus_per_node=3"], 3, 0),
        (["trainer.n_gpus_per_node=6", "actor_rollout_ref.hybrid_engine=False"], 2, 6),
    ],
)
def test_more_processes_of_the_host_than_cores_are_said_before_anything_starts(
    arguments: list[str],
    *,
    cores: int,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    config = load_config(RunConfig, ["trainer.device=cpu", *arguments]).config
    said: list[str] = []
    assert run_on_site(config, lambda site: said.extend(caplog.messages) or 0) == 0
    assert [text.partition(" share")[0] for text in said] == (
        [f"{arguments[0]}: {number} processes"] if number else []
    )


@pytest.mark.parametrize(("training", "number"), [("cpu", 3), ("musa", 0)])
def test_of_several_nodes_each_counts_its_own_processes_of_the_host(
    training: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # where the run makes its folder
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    head = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    for name, value in {**head, "RAY_ADDRESS": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    other = {"cpu": "musa", "musa": "cpu"}[training]
    arguments = ["trainer.nnodes=2", "trainer.n_gpus_per_node=3", f"trainer.device={training}"]
    apart = ["actor_rollout_ref.hybrid_engine=False", f"pools.generate.platform={other}"]
    config = load_config(RunConfig, [*arguments, *apart]).config
    assert run_on_site(config, lambda site: 0) == 0
    assert [text.partition(" share")[0] for text in caplog.messages] == (
        [f"trainer.n_gpus_per_node=3: {number} processes"] if number else []
    )


@pytest.fixture
def foreign(tmp_path: Path) -> ModelFolder:
    """A model that transformers' code computes."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return check_folder(str(tmp_path), load_weight=False)


def test_a_model_of_transformers_is_sharded_and_its_layers_are_not_divided(
    foreign: ModelFolder,
) -> None:
    size = "ulysses_sequence_parallel_size"
    for make, key in (
        (run_site, f"actor_rollout_ref.actor.fsdp_config.{size}"),
        (sft_site, size),
    ):
        site = make()
        assert fitted(site, foreign) is site
        with pytest.raises(UserError, match=f"{size}=2: transformers computes models of type"):
            fitted(make(f"{key}=2"), foreign)


def refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except UserError as error:
        return str(error)
    return ""


def test_what_a_worker_would_refuse_is_refused_before_it_starts(tiny_policy_folder: Path) -> None:
    described = json.loads((tiny_policy_folder / "config.json").read_text())
    described |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    models = {"actor-train": ModelSizes.of(described)}
    decoder = decoder_config(described)
    said: set[str] = set()
    for tensor, sequence in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 16)):
        sizes = (
            f"actor_rollout_ref.actor.fsdp_config.tensor_model_parallel_size={tensor}",
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={sequence}",
            f"trainer.n_gpus_per_node={tensor * sequence}",
        )
        config = load_config(RunConfig, sizes).config
        check_run(config)
        before = refusal(partial(require_division, config, place_run(config), models=models))
        by_worker = partial(check_layout, decoder, tensor=tensor, sequence=sequence)
        assert before == refusal(by_worker)
        said.add(before)
    assert "" in said and len(said) > 5


def test_a_layout_that_does_not_divide_is_named_by_the_commands_key(
    tiny_policy_folder: Path,
) -> None:
    """The model has one key/value head."""
    folder = check_folder(str(tiny_policy_folder))
    size = "tensor_model_parallel_size=2"
    actor = f"actor_rollout_ref.actor.fsdp_config.{size}"
    for site, setting in ((run_site(actor), actor), (sft_site(f"engine.{size}"), f"engine.{size}")):
        with pytest.raises(UserError, match=f"^{setting}: it must divide"):
            fitted(site, folder)


def test_a_run_on_one_accelerator_sets_memory_keys_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    family = {"model_type": "gpt2"}
    model = ModelFolder(Path("m"), sizes | family, None, trust_remote_code=False)
    config = load_config(RunConfig, ["actor_rollout_ref.model.path=m"]).config
    placement = place_run(config)

    def site(memory_gib: int) -> RunSite:
        own = replace(CPU, has_own_memory=True, total_memory_bytes=lambda: memory_gib << 30)
        platforms = {pool.name: own for pool in placement.used_pools}
        return RunSite(config, platforms, placement, cluster=None)

    monkeypatch.setattr(launch, "host_memory_bytes", lambda: 1000 << 30)
    with caplog.at_level("INFO"):
        chosen = fitted(site(250), model)
    assert chosen.config != config and chosen.chosen
    (record,) = [record for record in caplog.messages if "chosen to fit 250 GiB" in record]
    assert "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True" in record
    with pytest.raises(UserError, match="this run needs about"):
        fitted(site(30), model)
    monkeypatch.setattr(launch, "host_memory_bytes", lambda: 20 << 30)
    assert not any("offload" in key for key in fitted(site(250), model).chosen)
    moments = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
    config = load_config(RunConfig, ["actor_rollout_ref.model.path=m", f"{moments}=True"]).config
    with pytest.raises(UserError, match=rf"^memory of the host: .* Set {moments}=False\.$"):
        fitted(site(1000), model)
