# SPDX-License-Identifier: Apache-2.0
"""Runs of a model that sees, on several devices, have the results of one device (VL9), also if they
are resumed (VL13).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.engines.sharded_checkpoint import export_sharded
from tests.distributed.test_training import largest_difference
from tests.fakes.commands import Conditions, run_command
from tests.fakes.seeing_files import RUN_KEYS, write_policy, write_rows
from tests.fakes.tiny_run import metrics_of

KEYS = (*RUN_KEYS, "data.val_files=[]", "trainer.save_freq=2")
FROZEN = "actor_rollout_ref.actor.freeze_vision_tower=True"
HALVES = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[logp,actor-train],[ref_logp,generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
)
PLACES = {
    "one": ("trainer.n_gpus_per_node=1",),
    "two": ("trainer.n_gpus_per_node=2",),
    "one_frozen": ("trainer.n_gpus_per_node=1", FROZEN),
    "apart_frozen": (*HALVES, FROZEN, "trainer.async_pipeline=True"),
}


@pytest.fixture(scope="module")
def root(cluster: Conditions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run at each place."""
    root = tmp_path_factory.mktemp("seeing")
    write_rows(write_policy(root / "model", "qwen3_vl") / "rows.parquet", 12)
    for place, keys in PLACES.items():
        train(root, place, *keys, cluster=cluster)
    return root


def train(root: Path, place: str, *keys: str, cluster: Conditions) -> None:
    """Run the training into a folder, which must end well."""
    files = (
        f"actor_rollout_ref.model.path={root / 'model'}",
        f"data.train_files={root / 'model' / 'rows.parquet'}",
        f"trainer.default_local_dir={root / place}",
    )
    words = ["train", *files, *KEYS, *keys]
    ended = run_command(words, folder=root / f"{place}_out", conditions=cluster)
    assert ended.code == 0, ended.stderr


def test_vl9_results_do_not_depend_on_the_devices(root: Path) -> None:
    """VL9: two devices that do all, and one that trains beside one that generates."""
    # Sums over two ranks are in another order.
    assert largest_difference(root / "one", root / "two") < 1e-5
    # Without a lag, an asynchronous run draws and trains what a synchronous one does.
    assert largest_difference(root / "one_frozen", root / "apart_frozen") < 1e-5
    for place in PLACES:
        rows = metrics_of(root / place)
        assert all(row["training/rollout_probs_diff_max"] < 1e-5 for row in rows.values())


def test_vl9_a_checkpoint_of_several_ranks_has_the_tower(root: Path) -> None:
    """VL9: A frozen one as it was, although the ranks neither shard nor send it."""
    start = load_file(root / "model" / "model.safetensors")
    for place in ("two", "apart_frozen"):
        export_sharded(root / place / "global_step_2" / "actor", root / f"{place}_exported")
        ended = load_file(root / f"{place}_exported" / "model.safetensors")
        assert ended.keys() == start.keys()
        kept = {name for name in start if torch.equal(start[name], ended[name])}
        of_tower = {name for name in start if "visual." in name}
        assert (of_tower <= kept) == (place != "two")
        assert not kept - of_tower


def test_vl13_an_asynchronous_run_is_resumed(root: Path, cluster: Conditions) -> None:
    """VL13: the second of its two steps is trained by another start, with the same results."""
    keys = (*PLACES["apart_frozen"], "trainer.save_freq=1")
    train(root, "resumed", *keys, "trainer.total_training_steps=1", cluster=cluster)
    train(root, "resumed", *keys, cluster=cluster)
    assert list(metrics_of(root / "resumed")) == [1, 2]
    assert largest_difference(root / "apart_frozen", root / "resumed") < 1e-5
