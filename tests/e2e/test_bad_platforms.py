# SPDX-License-Identifier: Apache-2.0
"""Platforms, orders and transports that cannot be: a named error, exit code 2, at once, and nothing
in their place. What only a cluster can tell is in tests/distributed/test_mixed_*.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fakes.commands import check_refusal, run_command
from tests.fakes.tiny_run import Material, sft_arguments, train_arguments

MAX_S = 5.0
APART = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2")
MIXED = (*APART, "pools.actor-train.platform=npu", "pools.generate.platform=musa")
ON_HOST = (*APART, "trainer.device=host", "pools.generate.platform=musa")
INTERLEAVED = (
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.separated_node_tasks=[[actor-train],[generate],[logp,ref_logp]]",
    "trainer.separated_node_ratios=[0.5,0.25,0.25]",
    "trainer.device=npu",
    "pools.generate.platform=musa",
    # The same platform by another name.
    "pools.logp.platform=ascend",
)


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What all commands are forked from has been started."""
    run_command(["--version"], folder=tmp_path_factory.mktemp("first"))


def refuse(arguments: list[str], folder: Path, *parts: str) -> None:
    begin_s = time.monotonic()
    ended = run_command(arguments, folder=folder)
    assert time.monotonic() - begin_s < MAX_S
    check_refusal(ended, *parts)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (("trainer.device=asend",), ("trainer.device=asend: there is no such", "mean ascend?")),
        (
            ("pools.generate.platform=mussa",),
            ("pools.generate.platform=mussa: there is no such", "mean musa?"),
        ),
        (
            (*MIXED, "pools.transport=collective"),
            ("pools.transport=collective: the pools have npu and musa",),
        ),
        (
            (*MIXED, "pools.transport=flagcx"),
            ("pools.transport=flagcx: the pools have npu and musa", "Set pools.transport=staged"),
        ),
        (
            (*ON_HOST, "pools.transport=flagcx"),
            ("pools.transport=flagcx:", "a pool is on the host (cpu)"),
        ),
        (
            INTERLEAVED,
            ("those of npu must follow each other", "[[actor-train],[logp,ref_logp],[generate]]"),
        ),
    ],
    ids=["typo", "typo of a pool", "collective", "flagcx of Ascend", "flagcx of the host", "order"],
)
def test_what_cannot_be_is_refused_by_the_run_and_by_its_plan(
    material: Material, tmp_path: Path, *, command: str, keys: tuple[str, ...], parts: tuple[str]
) -> None:
    arguments = train_arguments(material, tmp_path / "run", *keys)
    assert arguments[0] == "train"
    refuse([command, *arguments[1:]], tmp_path, *parts)


def test_fine_tuning_and_its_plan_know_the_names_too(material: Material, tmp_path: Path) -> None:
    arguments = sft_arguments(material, tmp_path / "run", "trainer.device=cudda")
    says = "trainer.device=cudda: there is no such platform. Did you mean cuda?"
    refuse(arguments, tmp_path, says)
    refuse(["plan", *arguments], tmp_path, says)


def test_a_platform_that_is_not_here(material: Material, tmp_path: Path) -> None:
    says = ("mlu cannot be used here: the package torch_mlu is not installed", "can: cpu")
    arguments = train_arguments(material, tmp_path / "run", "trainer.device=cambricon")
    refuse(arguments, tmp_path, "trainer.device=mlu: ", *says)
    refuse(["certify", "--platform", "mlu"], tmp_path, "--platform=mlu: ", *says)


def test_an_engine_that_is_not_built_is_said_to_be_without_effect(
    material: Material, tmp_path: Path
) -> None:
    arguments = train_arguments(material, tmp_path / "run", "actor_rollout_ref.rollout.name=vllm")
    ended = run_command(["plan", "--json", *arguments[1:]], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert '"actor_rollout_ref.rollout.name": "engine not built yet' in ended.stdout
    ended = run_command([*arguments, "trainer.device=musa"], folder=tmp_path)
    notice = "actor_rollout_ref.rollout.name: engine not built yet: the native engine is used"
    assert notice in " ".join(ended.stderr.split())
    strategy = "actor_rollout_ref.actor.strategy=megatron"
    refuse(
        [*arguments, strategy], tmp_path, "strategy='megatron': is not built yet", "strategy=fsdp"
    )
