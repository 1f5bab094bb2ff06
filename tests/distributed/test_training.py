# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes, as a user starts them: the same results whatever the devices, where
each task ran, checkpoints across numbers of ranks, and exports.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.commands import Conditions, run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, repeatable, sft_arguments, train_arguments

SETTINGS = (
    "trainer.total_training_steps=5",
    "trainer.save_freq=2",
    "trainer.test_freq=5",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
"""Two optimizer steps a step with KL loss: old and reference log-probs are needed."""

PLACES = {
    "one": (),
    "two": ("trainer.n_gpus_per_node=2",),
    "four": ("trainer.n_gpus_per_node=4",),
    "split": (
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.hybrid_engine=False",
    ),
    "apart": (
        "trainer.n_gpus_per_node=4",
        "trainer.sperated_node_tasks=[logp,ref_logp,actor-train,generate]",
        "trainer.sperated_node_ratios=[0.25,0.25,0.25,0.25]",
    ),
    "tensor": (
        "trainer.n_gpus_per_node=3",
        "trainer.sperated_node_tasks=[[logp,ref_logp,actor-train],generate]",
        "trainer.sperated_node_ratios=[0.67,0.33]",
        "actor_rollout_ref.actor.fsdp_config.tensor_model_parallel_size=2",
        "actor_rollout_ref.ref.fsdp_config.tensor_model_parallel_size=2",
    ),
    "stages": (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2",
    ),
}
FEW = ("data.train_batch_size=2", "trainer.total_training_steps=3", "trainer.test_freq=3")
"""Fewer prompts than four devices. The steps end before rounding changes a token."""

PLACES |= {f"few_on_{place}": (*PLACES[place], *FEW) for place in ("one", "four")}
Run = Callable[[str], Path]


@pytest.fixture(scope="module")
def finished(
    material: Material, cluster: Conditions, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """The folder of a run at one of ``PLACES``, made when it is first asked for."""

    @cache
    def run(place: str) -> Path:
        folder = tmp_path_factory.mktemp(place)
        arguments = train_arguments(material, folder / "run", *SETTINGS, *PLACES[place])
        ended = run_command(arguments, folder=folder, conditions=cluster)
        assert ended.code == 0, ended.stderr
        return folder / "run"

    return run


def largest_difference(one: Path, other: Path) -> float:
    """Between the repeatable metrics of two runs, over all steps."""
    left, right = repeatable(metrics_of(one)), repeatable(metrics_of(other))
    assert left.keys() == right.keys()
    gaps = [abs(left[step][name] - right[step][name]) for step in left for name in left[step]]
    return max(gaps)


@pytest.mark.parametrize("place", ["two", pytest.param("four", marks=pytest.mark.deep)])
def test_results_do_not_depend_on_the_number_of_devices(finished: Run, place: str) -> None:
    assert largest_difference(finished("one"), finished(place)) < 1e-5


@pytest.mark.deep
def test_a_group_that_several_devices_generate_is_the_same(finished: Run) -> None:
    assert largest_difference(finished("few_on_one"), finished("few_on_four")) < 1e-5


def test_tensor_parallel_ranks_and_stages_train_as_one_process_does(
    material: Material, cluster: Conditions, tmp_path: Path
) -> None:
    """Two ranks train, and send their halves to a third that generates; MO11: two stages train,
    score and generate. The policy of the other tests has one head for keys, which cannot be
    divided.
    """
    policy = write_tiny_policy(tmp_path / "policy", size=replace(TINY, num_kv_heads=2))
    two_steps = ("trainer.total_training_steps=2", f"actor_rollout_ref.model.path={policy}")
    for place in ("one", "tensor", "stages"):
        arguments = train_arguments(material, tmp_path / place, *SETTINGS, *PLACES[place])
        folder = tmp_path / f"{place}_output"
        ended = run_command([*arguments, *two_steps], folder=folder, conditions=cluster)
        assert ended.code == 0, ended.stderr
    assert largest_difference(tmp_path / "one", tmp_path / "tensor") < 1e-5
    assert largest_difference(tmp_path / "one", tmp_path / "stages") < 1e-5


def test_tokens_of_each_rank_are_told(finished: Run) -> None:
    one, two = metrics_of(finished("one")), metrics_of(finished("two"))
    for step in range(1, 6):
        row = one[step]
        tokens = row["global_seqlen/mean"]
        assert row["global_seqlen/min"] == row["global_seqlen/balanced_max"] == tokens
        assert two[step]["global_seqlen/mean"] == tokens / 2
        least, most = (two[step][f"global_seqlen/balanced_{end}"] for end in ("min", "max"))
        assert least + most == pytest.approx(tokens)


def test_split_pools_compute_what_shared_devices_compute_bit_by_bit(finished: Run) -> None:
    colocated, split = finished("two"), finished("split")
    assert repeatable(metrics_of(split)) == repeatable(metrics_of(colocated))
    for file in sorted((colocated / "global_step_5/actor").glob("*.distcp")):
        assert (split / "global_step_5/actor" / file.name).read_bytes() == file.read_bytes()


def test_01_each_task_runs_where_it_was_placed(finished: Run) -> None:
    run = finished("apart")
    records = json.loads((run / "placement.json").read_text())
    assert [record["tasks"] for record in records] == [
        ["logp"],
        ["ref_logp"],
        ["actor-train"],
        ["generate"],
    ]
    assert len({record["pid"] for record in records}) == 4
    assert largest_difference(finished("one"), run) < 1e-5
    halves = json.loads((finished("split") / "placement.json").read_text())
    assert [record["tasks"][-1] for record in halves] == ["ref_logp"] * 2 + ["generate"] * 2


def test_checkpoints_resume_on_other_numbers_of_ranks(
    finished: Run, material: Material, cluster: Conditions, tmp_path: Path
) -> None:
    whole = finished("two")
    for place in ("one", "four"):
        arguments = train_arguments(
            material,
            tmp_path / place,
            *SETTINGS,
            *PLACES[place],
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={whole / 'global_step_2'}",
        )
        folder = tmp_path / f"{place}_output"
        ended = run_command(arguments, folder=folder, conditions=cluster)
        assert ended.code == 0, ended.stderr
        resumed, uninterrupted = metrics_of(tmp_path / place), metrics_of(whole)
        for step in (3, 4, 5):
            for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
                assert resumed[step][name] == pytest.approx(uninterrupted[step][name], abs=1e-5)


def test_an_export_has_the_weights_of_every_placement(finished: Run, tmp_path: Path) -> None:
    for place in ("two", "split"):
        output = tmp_path / place
        ended = run_command(
            ["export", str(finished(place)), "--output", str(output)], folder=tmp_path / "output"
        )
        assert ended.code == 0, ended.stderr
    one, other = (load_file(tmp_path / place / "model.safetensors") for place in ("two", "split"))
    reference = load_file(finished("one") / "global_step_5/actor/model.safetensors")
    assert one.keys() == other.keys() == reference.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])
        torch.testing.assert_close(tensor, reference[name], atol=1e-4, rtol=0)


def test_fine_tuning_does_not_depend_on_the_number_of_devices(
    material: Material, cluster: Conditions, tmp_path: Path
) -> None:
    for place in ("one", "two"):
        arguments = sft_arguments(material, tmp_path / place, *PLACES[place])
        folder = tmp_path / f"{place}_output"
        ended = run_command(arguments, folder=folder, conditions=cluster)
        assert ended.code == 0, ended.stderr
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
