# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes in each mode of updating weights: what is computed is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.commands import Conditions, run_command
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

ROLLOUT = "actor_rollout_ref.rollout"
PLACES = (
    "trainer.n_gpus_per_node=4",
    "trainer.separated_node_tasks=[actor-train,logp,generate]",
    "trainer.separated_node_ratios=[0.25,0.25,0.5]",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
)
"""One process trains, one scores with the weights as they are, two generate with them."""
MODES = {
    "second copy": (f"{ROLLOUT}.enable_dual_buffer=True",),
    "host": (f"{ROLLOUT}.enable_param_async=True",),
}


Run = Callable[..., Path]


@pytest.fixture(scope="module")
def train(material: Material, cluster: Conditions) -> Run:
    """What runs a command into a folder, and returns the folder of the run."""

    def run(folder: Path, *overrides: str) -> Path:
        arguments = train_arguments(material, folder / "run", *overrides)
        ended = run_command(arguments, folder=folder, conditions=cluster)
        assert ended.code == 0, ended.stderr
        return folder / "run"

    return run


@pytest.fixture(scope="module")
def in_place(train: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that updates weights where they are."""
    return train(tmp_path_factory.mktemp("in_place"), *PLACES)


@pytest.mark.parametrize("mode", ["host", pytest.param("second copy", marks=pytest.mark.deep)])
def test_16_a_run_computes_the_same_however_weights_move(
    in_place: Path, train: Run, tmp_path: Path, mode: str
) -> None:
    run = train(tmp_path, *PLACES, *MODES[mode])
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(in_place))
    for file in sorted((in_place / "global_step_3/actor").glob("*.distcp")):
        assert (run / "global_step_3/actor" / file.name).read_bytes() == file.read_bytes()
