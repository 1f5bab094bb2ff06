# SPDX-License-Identifier: Apache-2.0
"""L10: runs with adapters on several devices have the results of one device, wherever tasks are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_training import largest_difference
from tests.fakes.commands import Conditions, run_command
from tests.fakes.tiny_run import Material, metrics_of, train_arguments

ADAPTERS = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "data.val_files=[]",
    "trainer.save_freq=4",
    "trainer.device=cpu",
)
PLACES = {
    "one": (),
    "two": ("trainer.n_gpus_per_node=2",),
    "apart": (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.separated_node_tasks=[[logp,actor-train],[ref_logp,generate]]",
        "trainer.separated_node_ratios=[0.5,0.5]",
    ),
}


@pytest.fixture(scope="module")
def runs(
    material: Material, cluster: Conditions, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The folder of a run at each place."""
    root = tmp_path_factory.mktemp("adapters")
    for place, keys in PLACES.items():
        arguments = train_arguments(material, root / place, *ADAPTERS, *keys)
        ended = run_command(arguments, folder=root / f"{place}_output", conditions=cluster)
        assert ended.code == 0, ended.stderr
    return {place: root / place for place in PLACES}


def test_l10_results_do_not_depend_on_the_devices(runs: dict[str, Path]) -> None:
    """L10: the policy of a rollout elsewhere is the trainer's after each update."""
    for place in ("two", "apart"):
        assert largest_difference(runs["one"], runs[place]) < 1e-5
    # The rollout's policy is the trainer's after each update, so its log-probs are too.
    rows = metrics_of(runs["apart"])
    assert all(row["training/rollout_probs_diff_max"] < 1e-5 for row in rows.values())
    assert rows[1]["actor/kl_loss"] < rows[4]["actor/kl_loss"]
