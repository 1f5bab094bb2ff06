# SPDX-License-Identifier: Apache-2.0
"""A policy with adapters in a process that generates: it reads the base itself, the link changes
the adapters alone (L10), and the reference is over the same base (L4).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import HashStore

from tandem.comm.store import StorePlace
from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.engines.steps import score
from tandem.errors import UserError
from tandem.models.adapted import is_adapter
from tandem.models.language_model import NativeModel
from tandem.models.weights import WEIGHTS_FILE
from tandem.platforms.record import CPU
from tandem.types import HeldSlice
from tandem.workers.deployment import policy_spec, pool_jobs
from tandem.workers.job import PolicySpec
from tandem.workers.policies import (
    changing_slices,
    open_initial,
    open_received,
    received_folder,
    require_same_base,
)
from tests.unit.engines.minibatch import cut_batches
from tests.unit.models.tiny_models import NATIVE, open_fp32, write_hf

APART = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[logp,actor-train],[ref_logp,generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.model.lora_rank=4",
    "trainer.device=cpu",
)


def _config(folder: Path) -> RunConfig:
    return load_config(RunConfig, [*APART, f"actor_rollout_ref.model.path={folder}"]).config


def _received(spec: PolicySpec) -> NativeModel:
    folder = received_folder(spec)
    return open_received(spec, folder, platform=CPU, device=torch.device("cpu"))


def _bytes(slices: list[HeldSlice]) -> int:
    return sum(held.tensor.nbytes for held in slices)


def test_l10_a_received_policy_has_its_base_and_takes_adapters(tmp_path: Path) -> None:
    """L10: it reads the base itself, and only adapters change it."""
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    config = _config(tmp_path)
    spec = policy_spec(config, place_run(config), task="actor-train")
    policy, base = _received(spec), open_fp32(tmp_path)
    slices = changing_slices(policy)()
    assert all(is_adapter(held.spec.name) for held in slices)
    assert 0 < _bytes(slices) < _bytes(policy.held_slices())
    batch = cut_batches(3)[0]
    before = score(policy, batch, temperature=1.0).score_R
    assert torch.equal(before, score(base, batch, temperature=1.0).score_R)
    initial = open_initial(spec, policy)
    for held in slices:
        held.tensor.fill_(0.05)
    assert not torch.equal(score(policy, batch, temperature=1.0).score_R, before)
    assert torch.equal(score(initial, batch, temperature=1.0).score_R, before)
    assert initial.lm_head_weight.data_ptr() == policy.lm_head_weight.data_ptr()


def test_processes_that_read_other_bases_are_told_apart(tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "same")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    weights = load_file(tmp_path / "other" / WEIGHTS_FILE)
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "other" / WEIGHTS_FILE, metadata={"format": "pt"})
    store = HashStore()

    def join(name: str) -> None:
        config = _config(tmp_path / name)
        spec = policy_spec(config, place_run(config), task="actor-train")
        require_same_base(spec, store, host=f"host_{name}")

    join("one")
    join("same")
    with pytest.raises(UserError) as caught:
        join("other")
    assert "actor_rollout_ref.model.path=" in str(caught.value)
    assert (
        f"on host_other it has other weights than host_one:{tmp_path / 'one'}" in caught.value.rule
    )


def test_the_reference_needs_no_weights_where_adapters_are(tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    config = _config(tmp_path)
    placement = place_run(config)
    jobs = pool_jobs(
        config,
        placement,
        platforms={pool.name: CPU for pool in placement.used_pools},
        store=StorePlace("127.0.0.1", 1, "prefix"),
        eos_ids=(0,),
        total_steps=1,
    )
    trains, generates = (jobs[pool.name] for pool in placement.used_pools)
    assert trains.base is not None and generates.base == trains.base
    assert trains.reference is None and generates.reference is None
    assert generates.rollout is not None and generates.rollout.is_reference
