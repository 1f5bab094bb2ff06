# SPDX-License-Identifier: Apache-2.0
"""Platforms, orders and transports that cannot be: a named error, exit code 2, at once, and nothing
in their place. What only a cluster can tell is in tests/distributed/test_mixed_*.py.
"""

from __future__ import annotations

import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.testing.doubles import write_vendor_package
from tests.e2e.test_platforms import write_wheel
from tests.fakes.commands import Conditions, check_refusal, run_command
from tests.fakes.patience import PATIENCE_S
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, sft_arguments, train_arguments

MAX_S = PATIENCE_S
"""Far below the time for which a run waits for its nodes."""
APART = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2")
MIXED = (*APART, "pools.actor-train.platform=npu", "pools.generate.platform=musa")
ON_HOST = (*APART, "trainer.device=host", "pools.generate.platform=musa")
LAYOUT = "actor_rollout_ref.actor.fsdp_config"
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


def assert_refused(
    arguments: list[str], folder: Path, *parts: str, conditions: Conditions | None = None
) -> None:
    begin_s = time.monotonic()
    ended = run_command(arguments, folder=folder, conditions=conditions)
    assert time.monotonic() - begin_s < MAX_S
    check_refusal(ended, *parts)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (("trainer.device=asend",), ("trainer.device='asend': there is no such", "mean ascend?")),
        (
            ("pools.generate.platform=mussa",),
            ("pools.generate.platform='mussa': there is no such", "mean musa?"),
        ),
        (
            (*MIXED, "pools.transport=collective"),
            ("pools.transport='collective': the pools have npu and musa",),
        ),
        (
            (*MIXED, "pools.transport=flagcx"),
            ("pools.transport='flagcx': the pools have npu and musa", "Set pools.transport=staged"),
        ),
        (
            (*ON_HOST, "pools.transport=flagcx"),
            ("pools.transport='flagcx':", "a pool is on the host (cpu)"),
        ),
        (
            (
                *APART,
                "pools.actor-train.platform=musa",
                "pools.generate.platform=mlu",
            ),
            (
                "pools.*.platform: node 0 would have devices of musa and of mlu, which Ray both",
                "trainer.nnodes of at least 2",
            ),
        ),
        (
            ("trainer.n_gpus_per_node=2", f"{LAYOUT}.tensor_model_parallel_size=2"),
            (f"{LAYOUT}.tensor_model_parallel_size=2: it must divide", "1 key/value heads"),
        ),
        (
            INTERLEAVED,
            ("those of npu must follow each other", "[[actor-train],[logp,ref_logp],[generate]]"),
        ),
    ],
    ids=[
        "typo",
        "typo of a pool",
        "collective",
        "flagcx of Ascend",
        "flagcx of the host",
        "one node",
        "heads",
        "order",
    ],
)
def test_what_cannot_be_is_refused_by_the_run_and_by_its_plan(
    material: Material, tmp_path: Path, *, command: str, keys: tuple[str, ...], parts: tuple[str]
) -> None:
    arguments = train_arguments(material, tmp_path / "run", *keys)
    assert arguments[0] == "train"
    assert_refused([command, *arguments[1:]], tmp_path, *parts)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_environment_cannot_name_what_is_not_there(
    material: Material, tmp_path: Path, command: str
) -> None:
    arguments = train_arguments(material, tmp_path / "run")
    conditions = Conditions(environment={"VERL_PLATFORM": "asend"})
    says = ("VERL_PLATFORM='asend': there is no such platform. ", "mean ascend?")
    assert_refused([command, *arguments[1:]], tmp_path, *says, conditions=conditions)


def test_fine_tuning_and_its_plan_know_the_names_too(material: Material, tmp_path: Path) -> None:
    arguments = sft_arguments(material, tmp_path / "run", "trainer.device=cudda")
    says = "trainer.device='cudda': there is no such platform. Did you mean cuda?"
    assert_refused(arguments, tmp_path, says)
    assert_refused(["plan", *arguments], tmp_path, says)


def test_a_platform_that_is_not_here(material: Material, tmp_path: Path) -> None:
    says = ("mlu cannot be used here: the package torch_mlu is not installed", "can: cpu")
    arguments = train_arguments(material, tmp_path / "run", "trainer.device=cambricon")
    assert_refused(arguments, tmp_path, "trainer.device='mlu': ", *says)
    assert_refused(["certify", "--platform", "mlu"], tmp_path, "--platform='mlu': ", *says)


def without_ray(folder: Path) -> Conditions:
    """A machine on which loading Ray fails."""
    (folder / "ray").mkdir(parents=True)
    (folder / "ray/__init__.py").write_text("raise AssertionError('Ray was loaded')\n")
    return Conditions(environment={"PYTHONPATH": str(folder)})


def test_a_pool_that_this_machine_cannot_hold_is_refused_before_ray_is_loaded(
    material: Material, tmp_path: Path
) -> None:
    assert_refused(
        train_arguments(material, tmp_path / "run", *ON_HOST),
        tmp_path,
        "the nodes cannot hold the run. Needed: node 0 1 musa, 2 CPU. There: this machine 0 musa "
        "(the package torch_musa is not installed), ",
        "Name platforms that are here",
        conditions=without_ray(tmp_path / "path"),
    )


@pytest.mark.usefixtures("doubles")
def test_a_pool_with_more_devices_than_this_machine_has_is_refused_before_ray_is_loaded(
    material: Material, tmp_path: Path
) -> None:
    """The time is not bounded: a vendor's extension is loaded in a process of its own."""
    conditions = without_ray(tmp_path / "path")
    write_vendor_package(tmp_path / "path", "musa", num_devices=1)
    ended = run_command(
        train_arguments(material, tmp_path / "run", *ON_HOST, "trainer.n_gpus_per_node=4"),
        folder=tmp_path,
        conditions=conditions,
    )
    says = ("Needed: node 0 2 musa, 4 CPU. There: this machine 1 musa, ", "Lower these")
    check_refusal(ended, *says)
    assert not (tmp_path / "run").exists()


OLD = """
from dataclasses import replace
import torch
from tandem.platforms.record import CPU

def cannot() -> bool:
    return False

def name() -> str:
    return "Acme 1"

PLATFORM = replace(
    CPU, name="old", vendor="Acme", aliases=(), compute_dtype=torch.bfloat16,
    has_bfloat16=cannot, device_name=name,
)
"""
PAGED = """
from dataclasses import replace
from tandem.platforms.record import CPU

PLATFORM = replace(CPU, name="paged", vendor="Acme", aliases=(), kernels="triton")
"""


def installed(folder: Path, name: str, code: str) -> Conditions:
    """A machine with a platform of another package."""
    with zipfile.ZipFile(write_wheel(folder / "wheels", name, code)) as wheel:
        wheel.extractall(folder / "site")
    return Conditions(environment={"PYTHONPATH": str(folder / "site")})


def test_a_device_without_bfloat16_is_named_before_a_run_is_begun(
    material: Material, tmp_path: Path
) -> None:
    conditions = installed(tmp_path, "old", OLD)
    for arguments, section in (
        (train_arguments, "actor_rollout_ref.actor.fsdp_config"),
        (sft_arguments, "engine"),
    ):
        words = arguments(material, tmp_path / "run", "trainer.device=old")
        says = f"{section}.dtype='auto': Acme 1 does not compute in bfloat16. Set {section}.dtype="
        assert_refused(words, tmp_path, says, conditions=conditions)
        for key in ("dtype", "model_dtype"):
            keys = (f"{section}.dtype=float32", f"{section}.{key}=bfloat16")
            says = f"{section}.{key}='bfloat16': "
            assert_refused([*words, *keys], tmp_path, says, conditions=conditions)


def test_a_head_size_without_a_kernel_is_named_before_a_run_is_begun(
    material: Material, tmp_path: Path
) -> None:
    folder, size = tmp_path / "model", replace(TINY, hidden=48)
    write_tiny_policy(folder, size=size)
    key = "actor_rollout_ref.model.path"
    assert_refused(
        train_arguments(material, tmp_path / "run", f"{key}={folder}", "trainer.device=paged"),
        tmp_path,
        f"{key}='{folder}': its head dimension 24 has no attention kernel for paged",
        "trainer.device=cpu",
        conditions=installed(tmp_path, "paged", PAGED),
    )
