# SPDX-License-Identifier: Apache-2.0
"""``code_interpreter`` in real tool processes, under verl's names, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.agents import code_tool
from tandem.agents.code_tool import (
    CODE_TOOL,
    CodeInterpreter,
    check_protections,
    describe_take_over,
    read_program,
    survey_code_tools,
    take_over,
)
from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import EnvironmentSetup, Task, ToolLimits, ToolSpec
from tandem.agents.tool_files import read_tool_file
from tandem.children.code_jail import JailError
from tandem.children.jail_trial import Protection
from tandem.errors import UserError
from tandem.types import AssistantTurn, Observation, ToolCall, ToolStatus
from tests.fakes.patience import PATIENCE_S

RETOOL = """
tools:
  - class_name: "recipe.retool.retool.CustomSandboxFusionTool"
    config:
      sandbox_fusion_url: "http://localhost:8080/run_code"
      num_workers: 128
      enable_global_rate_limit: true
      rate_limit: 128
      default_timeout: 3
      default_language: "python"
      memory_limit_mb: 1024
      type: native

    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
          required: ["code"]
"""
"""verl's recipe/retool/sandbox_fusion_tool_config.yaml, with a shorter time."""
SANDBOX = RETOOL.replace(
    "recipe.retool.retool.CustomSandboxFusionTool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
)


def specs_of(text: str, folder: Path) -> tuple[ToolSpec, ...]:
    (folder / "tools.yaml").write_text(text)
    return read_tool_file(str(folder / "tools.yaml")).classes


def play(specs: tuple[ToolSpec, ...], *programs: str) -> Observation:
    """Let one turn call the tool for each program."""
    limits = ToolLimits(max_parallel_calls=len(programs), max_characters=300)
    setup = EnvironmentSetup(tools=tuple(map(take_over, specs)), limits=limits)
    calls = tuple(
        ToolCall(f"c{i}", "code_interpreter", json.dumps({"code": text}))
        for i, text in enumerate(programs)
    )
    task = Task(({"role": "user", "content": "q"},), "s", {}, 0, (0, 0), ("code_interpreter",))

    async def main() -> Observation:
        async with EnvironmentPool(setup, num_processes=1, environment=dict(os.environ)) as pool:
            session = pool.open(task)
            observation = await session.step(AssistantTurn("", calls))
            await session.close()
            return observation

    before = set(psutil.Process().children(recursive=True))
    observation = asyncio.run(main())
    assert set(psutil.Process().children(recursive=True)) <= before
    return observation


def texts(observation: Observation) -> list[str]:
    return [message["content"] for message in observation.messages]


def test_a_program_that_waits_too_long_for_others_is_no_mistake_of_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_tool, "QUEUE_S", 0.1)
    config = {"default_timeout": 0.1, "max_at_once": 1}

    async def wait_for_a_place() -> None:
        tool = CodeInterpreter(config, isolation="best_effort")
        await tool._jail._places.acquire()
        await tool.execute("a", {"code": "1"})

    with pytest.raises(JailError, match="other programs of the process left it no time"):
        asyncio.run(wait_for_a_place())
    shorter = take_over(ToolSpec(CODE_TOOL, {"default_timeout": 8, "timeout": 3}, None)).config
    assert shorter["default_timeout"] == 3 and shorter["timeout"] > 3 + code_tool.QUEUE_S


def test_retools_yaml_executes_programs_without_a_server(tmp_path: Path) -> None:
    observation = play(
        specs_of(RETOOL, tmp_path),
        "print(6 * 7)",
        "import math\nmath.comb(5, 2)",
        "```python\nx = 3\nx + 1\n```",
        "x = 1",
        "1 / 0",
        "while True: pass",
        "import os\nos.kill(os.getpid(), 11)",
        "import sys; sys.exit(3)",
        "import socket\nsocket.socket()",
    )
    told = texts(observation)
    assert told[:4] == ["42", "10", "4", "The program printed nothing."]
    assert told[4].endswith("ZeroDivisionError: division by zero")
    assert told[5:8] == [
        "\nStopped: the program took longer than 3 s.",
        "\nThe program was killed by SIGSEGV.",
        "The program ended with exit code 3.",
    ]
    assert told[8].endswith("PermissionError: [Errno 1] Operation not permitted")
    assert observation.statuses == (ToolStatus.OK,) * 9


def test_the_plain_sandbox_prints_what_is_printed(tmp_path: Path) -> None:
    assert texts(play(specs_of(SANDBOX, tmp_path), "print(1)\n2")) == ["1"]


def ownerless_places() -> set[Path]:
    """Return the places of scratch folders that no process has locked; others may run tests."""
    found = set()
    for place in Path("/dev/shm").glob("tandem-scratch-*"):
        with contextlib.suppress(OSError):  # it is locked, or was removed meanwhile
            descriptor = os.open(place, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                found.add(place)
            finally:
                os.close(descriptor)
    return found


@pytest.mark.parametrize(("scratch", "found"), [("call", "False"), ("episode", "True")])
def test_the_files_of_an_episode_are_kept_if_it_is_asked_for(scratch: str, found: str) -> None:
    spec = ToolSpec(CODE_TOOL, {"scratch": scratch, "scratch_mb": 1}, None)
    before = ownerless_places()
    observation = play(
        (spec,),
        "open('notes', 'w').write('7'); import os; print(os.listdir('.'))",
        "import os; print(os.path.exists('notes'))",
        "open('more', 'w').write('7' * (3 << 19))\nopen('n', 'w').write('7' * (3 << 19))",
    )
    told = texts(observation)
    assert told[:2] == ["['notes']", found]
    assert "File too large" in told[2]
    give_up_at_s = time.monotonic() + PATIENCE_S
    while left := ownerless_places() - before:  # a place of another process is not locked at once
        assert time.monotonic() < give_up_at_s, left
        time.sleep(0.02)


def test_an_interpreter_that_cannot_start_is_no_result_of_the_policy() -> None:
    spec = ToolSpec(CODE_TOOL, {"modules": ["no_such_module"]}, None)
    observation = play((spec,), "print(1)")
    assert observation.statuses == (ToolStatus.FAILED,)
    assert "no_such_module" in observation.detail


def test_a_sandbox_of_verl_is_replaced_in_one_line(tmp_path: Path) -> None:
    (spec,) = specs_of(RETOOL, tmp_path)
    assert take_over(spec).class_name == CODE_TOOL
    assert describe_take_over(spec) == (
        "recipe.retool.retool.CustomSandboxFusionTool is "
        "tandem.agents.code_tool.CodeInterpreter here, which executes programs in a jail; "
        "without effect: sandbox_fusion_url, num_workers, enable_global_rate_limit, rate_limit"
    )
    other = ToolSpec("mine.Tool", {"rate_limit": 1}, None)
    assert take_over(other) is other and describe_take_over(other) == ""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"memory": 1}, "there is no 'memory'; the fields are default_timeout, memory_limit_mb"),
        ({"default_language": "cpp"}, "default_language='cpp': only python is built"),
        ({"default_timeout": 0}, "default_timeout=0 must be a number above 0"),
        ({"memory_limit_mb": "1G"}, "memory_limit_mb='1G' must be a number above 0"),
        ({"scratch": True}, "scratch=True must be one of none, call, episode"),
        ({"scratch_mb": 0}, "scratch_mb=0 must be a number above 0"),
        ({"max_at_once": True}, "max_at_once=True must be a number above 0"),
    ],
)
def test_a_wrong_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeInterpreter(config)


def test_m20_strict_isolation_refuses_what_the_kernel_does_not_hold() -> None:
    held = Protection("files", "write files", "Landlock")
    check_protections((held, Protection("memory", "use more memory", "")))
    with pytest.raises(UserError) as caught:
        check_protections((held, Protection("network", "open sockets", "")))
    assert str(caught.value).startswith(
        "actor_rollout_ref.rollout.agent.isolation='strict': code that the policy writes could "
        "open sockets on this machine."
    )


def test_the_jail_is_tried_only_for_tools_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    protections = (Protection("files", "write files", ""),)
    monkeypatch.setattr(code_tool, "survey_protections", lambda: protections)
    assert survey_code_tools((ToolSpec(CODE_TOOL, {}, None),)) == protections
    assert survey_code_tools((ToolSpec("mine.Tool", {}, None),)) == ()


@pytest.mark.parametrize(
    ("code", "program"),
    [
        ("print(1)", "print(1)"),
        ("Let me see:\n```python\nprint(2)\n```\nand\n```py\nprint(3)\n```", "print(2)\n"),
        ("```python\nunfinished", "```python\nunfinished"),
        (7, "7"),
    ],
)
def test_the_program_of_a_call(code: Any, program: str) -> None:
    assert read_program(code) == program
