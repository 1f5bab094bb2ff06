# SPDX-License-Identifier: Apache-2.0
"""L4 in measured bytes: the weights of a run with adapters are in memory once, with its reference
and its rollout, and once for all runs over a shared base.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tandem.api import Engines
from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.platforms.record import CPU
from tandem.workers.colocated import build_colocated
from tandem.workers.shared_base import RunOverBase, SharedBase
from tests.unit.models.tiny_models import NATIVE, write_hf

KEYS = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "trainer.device=cpu",
)

TABLES = 1024
"""More bytes than the tables of rotary positions have, which are no weights."""


def build(folder: Path, *keys: str, over: RunOverBase | None = None) -> Engines:
    """Return the engines of a run, whose base is in ``folder``."""
    path = f"actor_rollout_ref.model.path={folder}"
    config = load_config(RunConfig, [path, *KEYS, *keys]).config
    return build_colocated(
        config, place_run(config), platform=CPU, eos_ids=(0,), total_steps=1, over=over
    )


def bytes_of_weights() -> int:
    """Return the bytes of the storages of all tensors of numbers that are in memory.

    A second copy of a base would be seen whatever holds it. Caches of keys and values are not
    allocated yet.
    """
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    numbers = [x for x in tensors if x.device.type == "cpu" and x.is_floating_point()]
    storages = [x.untyped_storage() for x in numbers]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, int]:
    """A folder of a base, and the bytes of its weights in fp32."""
    model = write_hf(NATIVE["qwen3_biases"](), tmp_path)
    return tmp_path, sum(4 * weight.numel() for weight in model.parameters())


def test_l4_the_reference_and_the_rollout_have_no_copy_of_the_base(base: tuple[Path, int]) -> None:
    """L4: in measured bytes."""
    folder, size = base
    before = bytes_of_weights()
    engines = build(folder)
    assert engines.reference is not None
    added = bytes_of_weights() - before
    assert size < added < 1.5 * size, "the base once, and adapters"
    del engines
    full = build(folder, "actor_rollout_ref.model.lora_rank=0")
    added = bytes_of_weights() - before
    assert 0 <= added - 2 * size < TABLES, "all weights, and those of the reference"
    del full


def test_runs_over_a_shared_base_hold_it_once(base: tuple[Path, int]) -> None:
    folder, size = base
    before = bytes_of_weights()
    shared = SharedBase(3)
    runs = [build(folder, over=RunOverBase(shared, 0))]
    one = bytes_of_weights() - before
    runs += [build(folder, over=RunOverBase(shared, index)) for index in (1, 2)]
    added = bytes_of_weights() - before
    assert abs(added - size - 3 * (one - size)) < TABLES
    assert len(runs) == 3
