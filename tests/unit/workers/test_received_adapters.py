# SPDX-License-Identifier: Apache-2.0
"""A policy with adapters in a process that generates: it reads the base itself, the link changes
the adapters alone (L10), and the reference is over the same base (L4).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import HashStore, Store

from tandem.comm.store import StorePlace
from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.engines.steps import score
from tandem.errors import UserError
from tandem.models.adapted import is_adapter, trained_parameters
from tandem.models.language_model import NativeModel
from tandem.models.weights import WEIGHTS_FILE
from tandem.platforms.record import CPU
from tandem.types import HeldSlice
from tandem.weight_sync.checksum import checksum
from tandem.weight_sync.link import open_link
from tandem.workers.deployment import policy_spec, pool_jobs
from tandem.workers.job import PolicySpec, WorkerJob
from tandem.workers.parts import (
    changing_slices,
    open_received,
    received_folder,
    require_same_base,
)
from tandem.workers.policies import open_initial
from tests.fakes.seeing_files import write_policy
from tests.fakes.tiny_adapters import open_adapted, spread_b
from tests.unit.engines.minibatch import cut_batches
from tests.unit.models.tiny_models import NATIVE, open_fp32, write_hf
from tests.unit.weight_sync.layouts import place, receiving, sending, settings
from tests.unit.weight_sync.threads import run_threads

APART = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[logp,actor-train],[ref_logp,generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.device=cpu",
)
ADAPTERS = ("actor_rollout_ref.model.lora_rank=4",)
FROZEN = ("actor_rollout_ref.actor.freeze_vision_tower=True",)


def _config(folder: Path, *keys: str) -> RunConfig:
    path = f"actor_rollout_ref.model.path={folder}"
    return load_config(RunConfig, [*APART, *(keys or ADAPTERS), path]).config


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


def _checksums(slices: list[HeldSlice]) -> dict[str, int]:
    return {held.spec.name: int(checksum(held.tensor)) for held in slices}


def test_l10_the_wire_carries_the_adapters_of_each_update_and_no_base(tmp_path: Path) -> None:
    """L10: measured bytes, and checksums on both sides before and after each update."""
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    config = _config(tmp_path)
    spec = policy_spec(config, place_run(config), task="actor-train")
    trained, received = open_adapted(tmp_path), _received(spec)
    sent_bytes = sum(x.nbytes for x in trained_parameters(trained.decoder).values())
    base = {x.spec.name: x for x in received.held_slices() if not is_adapter(x.spec.name)}
    before = _checksums(list(base.values()))

    def run(rank: int, store: Store) -> list[tuple[int, dict[str, int]]]:
        held = changing_slices(received)() if rank else trained.trained_slices()
        tensors = receiving(held) if rank else sending(held)
        link = open_link(store, place(rank, 2), tensors=tensors, settings=settings())
        found: list[tuple[int, dict[str, int]]] = []
        for version in (1, 2):
            if not rank:
                spread_b(trained, seed=version)  # an update
            report = link.transfer(version)
            found.append((report.sent_bytes + report.received_bytes, _checksums(held)))
        return found

    sender, receiver = run_threads(run, 2)
    assert sender == receiver
    assert [number for number, _ in sender] == [sent_bytes, sent_bytes]
    first, second = (sums for _, sums in sender)
    names = {name for name in first if name.endswith("lora_b")}
    assert names and {name for name in first if first[name] != second[name]} == names
    assert _checksums(list(base.values())) == before


def _spec(folder: Path, *keys: str) -> PolicySpec:
    config = _config(folder, *keys)
    return policy_spec(config, place_run(config), task="actor-train")


@pytest.mark.parametrize(
    ("keys", "changed", "part"),
    [
        (ADAPTERS, "model.norm.weight", "the base of the adapters"),
        (FROZEN, "visual.merger.norm.weight", "the frozen vision tower"),
    ],
    ids=["base", "tower"],
)
def test_processes_that_read_other_frozen_weights_are_told_apart(
    keys: tuple[str, ...], changed: str, part: str, tmp_path: Path
) -> None:
    if keys == FROZEN:
        write_policy(tmp_path / "one", "qwen3_vl")
    else:
        write_hf(NATIVE["qwen2_tied"](), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "same")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    weights = load_file(tmp_path / "other" / WEIGHTS_FILE)
    (name,) = [name for name in weights if name.endswith(changed)]
    weights[name][0] += 1
    save_file(weights, tmp_path / "other" / WEIGHTS_FILE, metadata={"format": "pt"})
    store = HashStore()
    for same in ("one", "same"):
        require_same_base(_spec(tmp_path / same, *keys), store, host=f"host_{same}")
    with pytest.raises(UserError) as caught:
        require_same_base(_spec(tmp_path / "other", *keys), store, host="host_other")
    message = str(caught.value)
    assert message.startswith(f"actor_rollout_ref.model.path='{tmp_path / 'other'}': ")
    assert "on host_other it has other weights, another config.json, or files of other" in message
    assert f"names or sizes than host_one:{tmp_path / 'one'}, and" in message
    assert f"each process reads {part} from its own disk" in message


def test_a_folder_with_another_config_is_told_apart_and_the_message_names_it(
    tmp_path: Path,
) -> None:
    write_policy(tmp_path / "one", "qwen3_vl")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "note": "edited"}))
    store = HashStore()
    require_same_base(_spec(tmp_path / "one", *FROZEN), store, host="host_one")
    with pytest.raises(UserError, match=r"on host_other it has .*another config\.json"):
        require_same_base(_spec(tmp_path / "other", *FROZEN), store, host="host_other")


def test_weights_that_are_all_sent_may_differ_on_disk(tmp_path: Path) -> None:
    """A model of text has no tower that could be frozen."""
    store = HashStore()
    for name, family in (("one", "qwen2_tied"), ("other", "qwen2_untied")):
        write_hf(NATIVE[family](), tmp_path / name)
        require_same_base(_spec(tmp_path / name, *FROZEN), store, host=name)
    assert store.num_keys() == 0


def _jobs(config: RunConfig) -> list[WorkerJob]:
    placement = place_run(config)
    jobs = pool_jobs(
        config,
        placement,
        platforms={pool.name: CPU for pool in placement.used_pools},
        store=StorePlace("127.0.0.1", 1, "prefix"),
        eos_ids=(0,),
        total_steps=1,
    )
    return [jobs[pool.name] for pool in placement.used_pools]


def test_all_processes_compare_a_frozen_tower(tmp_path: Path) -> None:
    write_policy(tmp_path / "model", "qwen3_vl")
    trains, generates = _jobs(_config(tmp_path / "model", *FROZEN))
    assert trains.base is not None and generates.base == trains.base
    whole = "actor_rollout_ref.actor.freeze_vision_tower=False"
    assert all(job.base is None for job in _jobs(_config(tmp_path / "model", whole)))


def test_the_reference_needs_no_weights_where_adapters_are(tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    trains, generates = _jobs(_config(tmp_path))
    assert trains.base is not None and generates.base == trains.base
    assert trains.reference is None and generates.reference is None
    assert generates.rollout is not None and generates.rollout.is_reference
