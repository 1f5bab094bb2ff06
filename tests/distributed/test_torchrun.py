# SPDX-License-Identifier: Apache-2.0
"""verl's commands for supervised fine-tuning as verl's scripts start them: by a real torchrun."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.fakes.patience import LIMIT_S, PATIENCE_S
from tests.fakes.tiny_run import Material, metrics_of, repeatable, sft_arguments

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ENTRY = ("-m", "tandem.trainer.fsdp_sft_trainer")
LONG = ("trainer.total_epochs=1000", "trainer.total_training_steps=6000")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Python with these words, in a session of its own; its output is in a file."""
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def run_to_end(folder: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    code = start(folder, *words).wait(timeout=4 * LIMIT_S)
    return code, (folder / "output.txt").read_text()


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


def test_two_processes_of_torchrun_train_like_one(material: Material, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    code, output = run_to_end(tmp_path, *ENTRY, *sft_arguments(material, one)[1:])
    assert code == 0, output
    code, output = run_to_end(tmp_path, *TORCHRUN, *ENTRY, *sft_arguments(material, two)[1:])
    assert code == 0, output
    assert output.count("step 1/") == 1, "one process reports"
    found, expected = repeatable(metrics_of(two)), repeatable(metrics_of(one))
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, metrics in expected.items():
        assert found[step] == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    assert len((two / "placement.json").read_text().split('"rank"')) == 3, "two processes train"


def test_a_mistake_is_said_once_and_ends_all_processes(material: Material, tmp_path: Path) -> None:
    arguments = sft_arguments(material, tmp_path / "run", "trainer.n_gpus_per_node=4")[1:]
    code, output = run_to_end(tmp_path, *TORCHRUN, *ENTRY, *arguments)
    assert code == 1
    (error,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert error == (
        "error: trainer.n_gpus_per_node='4': torchrun started 2 process(es) on each of 1 node(s). "
        "Set trainer.n_gpus_per_node=2, or leave the key out."
    )


def has_trained(run: Path) -> bool:
    """Whether a step of training is on record."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and "train/loss" in metrics.read_text()


@pytest.mark.parametrize(
    "victim",
    [
        "torchrun",
        *(
            pytest.param(rank, marks=pytest.mark.deep)
            for rank in ("first process", "second process")
        ),
    ],
)
def test_the_end_of_one_process_is_the_end_of_all(
    victim: str, material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launcher = start(tmp_path, *TORCHRUN, *ENTRY, *sft_arguments(material, run, *LONG)[1:])
    deadline = time.monotonic() + 3 * LIMIT_S
    while not has_trained(run) and time.monotonic() < deadline:
        assert launcher.poll() is None, (tmp_path / "output.txt").read_text()
        time.sleep(0.1)
    assert has_trained(run), "no step in time"
    torchrun = psutil.Process(launcher.pid)
    ranks = {child.environ()["LOCAL_RANK"]: child for child in torchrun.children()}
    everything = [torchrun, *torchrun.children(recursive=True)]
    victims = {"torchrun": torchrun, "first process": ranks["0"], "second process": ranks["1"]}
    victims[victim].kill()
    assert launcher.wait(timeout=PATIENCE_S) != 0
    wait_until_gone(everything)
    saved = (run / "latest_checkpointed_iteration.txt").exists()
    assert saved == (victim != "first process"), "the first process saves before it ends"
