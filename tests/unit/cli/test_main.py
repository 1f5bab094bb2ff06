# SPDX-License-Identifier: Apache-2.0
"""The entry: help without torch, one-line errors, exit codes, verl's module names."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.cli.main import COMMANDS, EXIT_BROKEN_PIPE, main

ROOT = Path(__file__).parents[3]
MOST_MODULES_OF_HELP = 200
"""It loads about 80, a third of them Python's own; torch alone brings more than a thousand."""

LEAVE = "sys.exit(code)\n"
COUNT_MODULES = "print(len(sys.modules), file=sys.stderr)\n"
WITHOUT_TORCH = """
import sys
from tandem.cli.main import main
for words in sys.argv[1:]:
    code = main(words.split())
    assert not {"torch", "transformers", "hydra"} & set(sys.modules) - set(%r), words
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    """The modules are counted, because seconds depend on the machine."""
    result = run_python("-c", WITHOUT_TORCH % [()] + COUNT_MODULES + LEAVE, "--help")
    assert result.returncode == 0, result.stderr
    assert all(f"  {name} " in result.stdout for name in COMMANDS)
    assert int(result.stderr) < MOST_MODULES_OF_HELP


def test_the_plan_imports_no_torch() -> None:
    keys = "data.train_files=none actor_rollout_ref.model.path=nobody/nothing"
    script = WITHOUT_TORCH % ["hydra"] + LEAVE
    result = run_python("-c", script, f"plan --elsewhere --json {keys}")
    assert result.returncode == 0, result.stderr


def test_mistyped_keys_and_platforms_are_found_before_torch_is_imported() -> None:
    keys = [f"{command} data.train_batchsize=4" for command in ("train", "sft")]
    platforms = [f"{command} trainer.device=asend" for command in ("train", "sft", "plan")]
    result = run_python("-c", WITHOUT_TORCH % ["hydra"] + LEAVE, *keys, *platforms)
    assert result.returncode == 2, result.stderr
    no_key = "error: data.train_batchsize=4: no such key"
    no_platform = "error: trainer.device='asend': there is no such platform. Did you mean"
    messages = result.stderr.splitlines()
    assert len(messages) == 5
    assert all(message.startswith(no_key) for message in messages[:2])
    assert all(message.startswith(no_platform) for message in messages[2:])


@pytest.mark.parametrize(
    ("module", "key"),
    [
        ("main_ppo", "data.filter_overlong_prompt"),
        ("fsdp_sft_trainer", "enginee"),
        ("sft_trainer", "enginee"),
    ],
)
def test_verls_module_names_are_train_and_sft(
    module: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, f"{key}=1"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(f"tandem.trainer.{module}", run_name="__main__")
    assert exit_.value.code == 2
    assert f"error: {key}=1: no such key" in capsys.readouterr().err


def test_every_command_has_its_module() -> None:
    for command in COMMANDS.values():
        assert find_spec(command.module) is not None
        assert not command.parser or find_spec(command.parser) is not None


def test_a_mistake_is_one_line_on_stderr_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "trainer.nnodes=two"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: trainer.nnodes='two': must be an integer. Set trainer.nnodes=1 (the default).\n"
    )


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "'trian': no such command. Choose among quickstart, train" in capsys.readouterr().err


def test_no_command_prints_the_help_and_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: tandem COMMAND")


def test_a_reader_that_leaves_early_is_no_mistake() -> None:
    command = f"{sys.executable} -m tandem plan --help | head -n 1"
    result = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("usage: tandem plan")
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["--help", "compare LOG LOG", "plan --elsewhere"])
def test_a_reader_that_left_before_the_output_is_no_mistake(command: str, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2, "train/loss": 0.4}\n')
    words = command.replace("LOG", str(log)).split()
    unread, written = os.pipe()
    os.close(unread)
    result = subprocess.run(
        [sys.executable, "-m", "tandem", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=written,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(written)
    assert result.returncode == EXIT_BROKEN_PIPE
    assert "error" not in result.stderr.lower()
