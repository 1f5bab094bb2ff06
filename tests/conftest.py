# SPDX-License-Identifier: Apache-2.0
"""For all tests: one thread a process, fixed seeds, and a tiny tokenizer and model to share."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from tests.fakes.commands import Conditions
    from tests.fakes.tiny_run import Material

pytest_plugins = ("tandem.testing.plugin",)

# Set before torch is imported: more threads than cores make small tensors many times slower.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

OF_OTHER_MACHINES = (
    "needs a GPU",
    "needs two GPUs",
    "needs vllm",
    "needs sglang",
    "needs smolagents",
    "needs langgraph",
    "has a device",
    "recorded with",
)
"""How the reasons begin for which a test is skipped with ``--must-run`` too."""
LONGEST = (
    "engines/test_parity.py",
    "engines/test_quickstart.py",
    "engines/test_sglang_run.py",
    "engines/test_several_devices.py",
    "engines/test_sglang_parity.py",
    "engines/test_killed_workers.py",
    "engines/test_published_commands.py",
    "engines/test_sglang.py",
    "engines/test_servers.py",
    "engines/test_runs.py",
    "engines/test_tensor_parallel.py",
    "distributed/test_ray.py",
    "distributed/test_two_nodes.py",
    "distributed/test_fsdp.py",
    "distributed/test_sync.py",
    "distributed/test_external_engine.py",
    "distributed/test_async.py",
    "distributed/test_async_commands.py",
    "chaos/test_killed_runs.py",
    "chaos/test_async_deaths.py",
    "chaos/test_killed_workers.py",
    "chaos/test_replaced_workers.py",
    "distributed/test_torchrun.py",
    "distributed/test_training.py",
    "distributed/test_mixed_training.py",
    "distributed/test_mixed_async.py",
    "distributed/test_fsdp_checkpoints.py",
    "distributed/test_stages.py",
    "distributed/test_adapters.py",
    "distributed/test_seeing_runs.py",
    "distributed/test_reward_pool.py",
    "e2e/",
    "distributed/",
    "chaos/",
    "children/",
)
"""Files and folders that start first where processes share the files, the longest before others:
a long file that starts last would be waited for alone."""
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    """A tool or a right that is missing must not take a test away unseen."""
    parser.addoption("--must-run", action="store_true", help="fail tests that would be skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Without an accelerator kernels are interpreted; triton reads this once, when imported."""
    import torch

    # pytest-xdist would start the files with the most tests first, which are the quickest.
    config.option.loadscopereorder = False
    if not torch.accelerator.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, in a process that shares them with others."""
    if hasattr(config, "workerinput"):
        root = Path(__file__).parent
        items.sort(key=lambda item: _place(item.path.relative_to(root).as_posix()))


def _place(file: str) -> int:
    """Return the number of the first entry of ``LONGEST`` that a file is or stands in."""
    fits = (number for number, start in enumerate(LONGEST) if file.startswith(start))
    return next(fits, len(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
    """Of a test."""
    return _strict(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, Any, pytest.CollectReport]:
    """Of a file, which can skip itself."""
    return _strict(collector.config, (yield))


def _strict(config: pytest.Config, report: Report) -> Report:
    """A skip of which nobody can say that it belongs on this machine becomes a failure."""
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_skip and config.getoption("--must-run") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(OF_OTHER_MACHINES):
            report.outcome = "failed"
            report.longrepr = f"skipped, and must run here: {reason}"
    return report


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The same random numbers and arithmetic in every test, whatever ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
        if torch.accelerator.is_available():
            torch.manual_seed(0)
        else:  # the same, but for the caller's stack that it keeps for each device that may come
            torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face tokenizer with a ChatML template. Do not write into it."""
    from tests.fakes.tiny_policy import write_tiny_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and a random Qwen2 model of some 30,000 parameters. Do not write into it."""
    from tests.fakes.tiny_policy import write_tiny_policy

    return write_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """Policy, prompts and demonstrations of test runs. Do not write into them."""
    from tests.fakes.tiny_run import write_material

    return write_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Conditions]:
    """Conditions of commands for which it is of no interest how their cluster starts and ends."""
    from tests.fakes.forking.cluster import shared_cluster

    with shared_cluster() as conditions:
        yield conditions
