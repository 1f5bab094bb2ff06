# SPDX-License-Identifier: Apache-2.0
"""Mistakes in keys of asynchronous and split runs (acceptance test 2): exit code 2 and one line
with key and remedy, before any process or folder is made.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.processes import MARK, processes_with
from tests.fakes.commands import Conditions, check_refusal, run_command
from tests.fakes.tiny_run import Material, train_arguments

ASYNC = "trainer.async_pipeline=True"
AHEAD = "trainer.generate_ahead_steps"
FOUR = "trainer.n_gpus_per_node=4"
TASKS, RATIOS = "trainer.separated_node_tasks", "trainer.separated_node_ratios"
RATIOS_MISSPELT = "trainer.sperated_node_ratios"
CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"
HALVES = (FOUR, "actor_rollout_ref.hybrid_engine=False", ASYNC)
GROUPS = f"{TASKS}=[[logp,actor-train],ref_logp,generate]"
THIRDS = f"{RATIOS}=[0.5,0.25,0.25]"

MISTAKES = {
    "negative lag": ((*HALVES, f"{AHEAD}=-1"), (f"{AHEAD}=-1", "at least 0", f"Set {AHEAD}=")),
    "no split": (
        (FOUR, ASYNC, f"{AHEAD}=1"),
        (ASYNC, "devices of its own", "Set actor_rollout_ref.hybrid_engine=False"),
    ),
    "generate beside the trainer": (
        (FOUR, ASYNC, f"{TASKS}=[[actor-train,logp,generate],ref_logp]", f"{RATIOS}=[0.5,0.5]"),
        (ASYNC, "Set actor_rollout_ref.hybrid_engine=False", f"out of that group in {TASKS}"),
    ),
    "one device": (
        ("actor_rollout_ref.hybrid_engine=False", ASYNC),
        ("actor_rollout_ref.hybrid_engine=False", "Set trainer.n_gpus_per_node=2"),
    ),
    "a lag beyond all use": (
        (*HALVES, f"{AHEAD}=100000000000"),
        (f"{AHEAD}=100000000000", "at most 1000", f"Set {AHEAD}="),
    ),
    "a switch and its other spelling": (
        (*HALVES, "actor_rollout_ref.async_pipeline=False"),
        (ASYNC, "actor_rollout_ref.async_pipeline=False", "Leave one of them out"),
    ),
    "ratios and their other spelling": (
        (FOUR, ASYNC, GROUPS, f"{RATIOS_MISSPELT}=[0.25,0.25,0.5]", THIRDS),
        (f"{RATIOS_MISSPELT}=[0.25,0.25,0.5]", f"{RATIOS}=[0.5,0.25,0.25]", "Leave one"),
    ),
    "a rejection from 0 on": (
        (*HALVES, f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0"),
        (f"{CORRECTION}.rollout_rs_threshold=0.0", f"Set {CORRECTION}.rollout_rs_threshold=2.0"),
    ),
    "a rejection without bound": (
        (*HALVES, f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold='inf'"),
        (f"{CORRECTION}.rollout_rs_threshold='inf'", "must be one positive bound", "Set "),
    ),
    "weights without bound": (
        (*HALVES, f"{CORRECTION}.rollout_is_threshold=inf"),
        (f"{CORRECTION}.rollout_is_threshold='inf'", "must be a number of at least 1", "Set "),
    ),
    "a ratio that is no number": (
        (FOUR, ASYNC, GROUPS, f"{RATIOS}=[0.5,nan,0.25]"),
        (f"{RATIOS}.1=nan", "a finite number", f"Set {RATIOS}=[0.34,0.33,0.33]", "3 groups"),
    ),
    "first bucket of 0": (
        (*HALVES, f"{ROLLOUT}.param_update_preduce_bucket_size_mb=0"),
        (f"{ROLLOUT}.param_update_preduce_bucket_size_mb=0", "at least 1", "Set "),
    ),
    "second bucket of 0": (
        (*HALVES, f"{ROLLOUT}.param_update_consume_bucket_size_mb=0"),
        (f"{ROLLOUT}.param_update_consume_bucket_size_mb=0", "at least 1", "Set "),
    ),
    "ratios above 1": (
        (FOUR, ASYNC, GROUPS, f"{RATIOS}=[0.5,0.5,0.25]"),
        (f"{RATIOS}=[0.5,0.5,0.25]", "at most 1", f"Set {RATIOS}=[0.4,0.4,0.2]"),
    ),
    "a ratio of 0": (
        (FOUR, ASYNC, GROUPS, f"{RATIOS}=[0.5,0.5,0]"),
        (f"{RATIOS}=[0.5,0.5,0.0]", "must be positive"),
    ),
    "too few ratios": (
        (FOUR, ASYNC, GROUPS, f"{RATIOS}=[0.5,0.5]"),
        (f"{RATIOS}=[0.5,0.5]", "one ratio for each of the 3 groups", "Write 3 numbers"),
    ),
    "ratios without tasks": (
        (FOUR, ASYNC, THIRDS),
        (f"{RATIOS}=[0.5,0.25,0.25]", f"{TASKS} is missing", f"set {RATIOS}=[]"),
    ),
    "unknown task": (
        (FOUR, ASYNC, f"{TASKS}=[[logp,train],ref_logp,generate]", THIRDS),
        (f"{TASKS}=", "'train' is not a task", "Name each of actor-train"),
    ),
    "a task twice": (
        (FOUR, ASYNC, f"{TASKS}=[[logp,actor-train],generate,generate]", THIRDS),
        (f"{TASKS}=", "'generate' is named more than once"),
    ),
    "a task missing": (
        (FOUR, ASYNC, f"{TASKS}=[logp,actor-train]", f"{RATIOS}=[0.5,0.5]"),
        (f"{TASKS}=", "generate is missing", "Add it to a group"),
    ),
    "a group without a device": (
        ("trainer.n_gpus_per_node=2", ASYNC, GROUPS, THIRDS),
        (f"{RATIOS}=[0.5,0.25,0.25]", "none of 2 devices", "Set trainer.n_gpus_per_node="),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_02_what_cannot_be_is_refused_before_anything_starts(
    material: Material, tmp_path: Path, mistake: str
) -> None:
    overrides, says = MISTAKES[mistake]
    run = tmp_path / "run"
    conditions = Conditions(environment={MARK: str(run)})
    ended = run_command(
        train_arguments(material, run, *overrides), folder=tmp_path, conditions=conditions
    )
    check_refusal(ended, *says)
    assert not run.exists()
    assert not processes_with(str(run))
