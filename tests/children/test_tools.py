# SPDX-License-Identifier: Apache-2.0
"""Tools in child processes: verl's classes of three versions, limits and failures (M9, M10, M12).

The processes are real. Each test starts one or two.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import (
    EnvironmentSetup,
    InteractionSpec,
    Task,
    ToolLimits,
    ToolSpec,
    TruncateSide,
)
from tandem.agents.tools import cut_text
from tandem.agents.worker import NUMBER_BYTES
from tandem.errors import RunFailure, UserError
from tandem.types import AssistantTurn, Observation, ToolCall, ToolStatus
from tests.fakes.killing import next_children_killed

CLASSES = '''
import asyncio, os, time
from typing import Any
from uuid import uuid4
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op
from verl.interactions.base import BaseInteraction

class OldCounter(BaseTool):
    """A tool of verl 0.5: create gets its arguments one by one; results are texts."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.counts = {}

    async def create(self, instance_id=None, start=0, **kwargs):
        instance_id = instance_id or str(uuid4())
        self.counts[instance_id] = start
        return instance_id

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += 1
        return f"{self.counts[instance_id]}", 0.5, {}

    async def release(self, instance_id, **kwargs):
        del self.counts[instance_id]
        with open(self.config["notes"], "a") as file:
            file.write("r")

class Slow(BaseTool):
    """A tool whose create and execute give way to other calls."""

    living = set()

    async def create(self, instance_id=None, **kwargs):
        await asyncio.sleep(0.05)
        instance_id = str(uuid4())
        self.living.add(instance_id)
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(parameters["wait"])
        return f"{instance_id in self.living} {len(self.living)}"

    async def release(self, instance_id, **kwargs):
        self.living.remove(instance_id)

class NewEcho(BaseTool):
    """A tool of verl 0.9: create gets create_kwargs, execute gets agent_data; it has a schema."""

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {
            "name": "echo", "description": "d", "parameters": {"type": "object",
            "properties": {"text": {"type": "string"}}, "required": ["text"]}}})

    async def create(self, instance_id=None, **kwargs):
        self.prefix = kwargs.get("create_kwargs", {}).get("prefix", "")
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id, parameters, *, agent_data):
        return ToolResponse(text=self.prefix + parameters["text"]), None, {}

class Strict(BaseInteraction):
    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truth = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        answer = messages[-1]["content"]
        if answer == self.truth:
            return True, "Right.", 1.0, {}
        return False, "Wrong, try again.", 0.0, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        with open(self.config["notes"], "a") as file:
            file.write("f")
'''
FUNCTIONS = '''
import asyncio, os, time
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

@function_tool("wait")
async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"

@function_tool
def hang(seconds: float) -> str:
    """Block a thread.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"

def write_to_sockets(text):
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                os.write(int(name), text.encode() + b"\\n")
        except OSError:
            pass


@function_tool
def give(what: str) -> str:
    """Return something odd.

    Args:
        what: Which.
    """
    odd = {"none": None, "bytes": b"abc", "dict": {"x": 1}, "long": "0123456789" * 10_000_000,
           "reward": ("text", 0.25, {}), "four": (1, 2, 3, 4)}
    if what == "pid":
        return os.getpid()
    if what == "raise":
        raise KeyError("gone")
    if what == "die":
        os._exit(3)
    if what.startswith("write "):
        write_to_sockets(what.removeprefix("write "))
        time.sleep(60)
    if what == "late":
        raise TimeoutError("the backend does not answer")
    if what == "environments":
        import gc
        from tandem.agents.environment import ToolEnvironment
        gc.collect()
        return sum(isinstance(one, ToolEnvironment) for one in gc.get_objects())
    if what == "torch":
        import sys
        return ",".join(name for name in ("torch", "transformers") if name in sys.modules)
    return odd[what]
'''
COUNTER = {
    "type": "function",
    "function": {"name": "count", "description": "d", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "made_tools.py").write_text(CLASSES)
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture
def functions(folder: Path) -> EnvironmentSetup:
    limits = ToolLimits(max_parallel_calls=3, max_characters=40, timeout_s=10.0)
    return EnvironmentSetup(function_path=str(folder / "functions.py"), limits=limits)


@pytest.fixture
def classes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSetup:
    monkeypatch.syspath_prepend(str(folder))
    notes = {"notes": str(tmp_path / "notes")}
    return EnvironmentSetup(
        tools=(
            ToolSpec("made_tools.OldCounter", notes, COUNTER),
            ToolSpec("made_tools.NewEcho", {}, None),
        ),
        interactions=(InteractionSpec("strict", "made_tools.Strict", notes),),
        limits=ToolLimits(max_parallel_calls=2),
    )


def in_pool(
    setup: EnvironmentSetup,
    work: Callable[[EnvironmentPool], Coroutine[Any, Any, Any]],
    *,
    num_processes: int = 1,
) -> Any:
    async def main() -> Any:
        variables = dict(os.environ)
        pool = EnvironmentPool(setup, num_processes=num_processes, environment=variables)
        async with pool:
            return await work(pool)

    return asyncio.run(main())


def task(tools: Sequence[str] = (), number: int = 0, **extra_info: Any) -> Task:
    names = tuple(tools) or ("add", "wait", "hang", "give", "count", "echo")
    return Task(({"role": "user", "content": "q"},), "s", extra_info, 0, (0, number), names)


def turn(*calls: tuple[str, dict[str, Any]], malformed: tuple[str, ...] = ()) -> AssistantTurn:
    made = [ToolCall(f"c{i}", name, json.dumps(given)) for i, (name, given) in enumerate(calls)]
    return AssistantTurn("", tuple(made), malformed)


def texts(observation: Observation) -> list[str]:
    return [message["content"] for message in observation.messages]


def play(setup: EnvironmentSetup, *turns: AssistantTurn, of: Task | None = None) -> Any:
    async def work(pool: EnvironmentPool) -> list[Observation]:
        session = pool.open(of or task())
        observations = [await session.step(each) for each in turns]
        await session.close()
        return observations

    return in_pool(setup, work)


def test_m9_an_instance_lives_for_a_trajectory_and_is_released_once(
    classes: EnvironmentSetup, tmp_path: Path
) -> None:
    kwargs = {"count": {"create_kwargs": {"start": 5}}, "echo": {"create_kwargs": {"prefix": ">"}}}
    of = task(tools_kwargs=kwargs, interaction_kwargs={"name": "strict", "ground_truth": "42"})
    observations = play(
        classes,
        turn(("count", {})),
        turn(("count", {}), ("echo", {"text": "hi"})),
        turn(("count", {})),
        of=of,
    )
    assert [texts(one) for one in observations] == [["6"], ["7", ">hi"], ["8"]]
    assert [one.rewards for one in observations] == [(0.5,)] * 3
    assert (tmp_path / "notes").read_text() == "r"


@pytest.mark.parametrize("per_call", [False, True])
def test_calls_at_the_same_time_use_instances_that_live_and_are_all_released(
    classes: EnvironmentSetup, per_call: bool
) -> None:
    tool = ToolSpec("made_tools.Slow", {"per_call": per_call}, COUNTER)
    setup = replace(classes, tools=(tool,), interactions=())

    async def work(pool: EnvironmentPool) -> list[Observation]:
        first, second = pool.open(task()), pool.open(task(number=1))
        both = await first.step(turn(("count", {"wait": 0.01}), ("count", {"wait": 0.1})))
        await first.close()
        return [both, await second.step(turn(("count", {"wait": 0.0})))]

    both, after = in_pool(setup, work)
    assert both.statuses == (ToolStatus.OK,) * 2
    assert [text.split()[0] for text in texts(both)] == ["True", "True"]
    assert texts(after) == ["True 1"], "the first episode has released its instances"


def test_m9_interactions_answer_turns_without_calls_and_are_always_finalized(
    classes: EnvironmentSetup, tmp_path: Path
) -> None:
    of = task(interaction_kwargs={"name": "strict", "ground_truth": "42"})
    wrong, right = play(classes, AssistantTurn("41"), AssistantTurn("42"), of=of)
    assert (texts(wrong), wrong.rewards, wrong.done) == (["Wrong, try again."], (0.0,), False)
    assert wrong.messages[0]["role"] == "user"
    assert (right.rewards, right.done) == ((1.0,), True)
    assert (tmp_path / "notes").read_text() == "f"


def test_m9_schemas_come_from_signatures_docstrings_and_classes(
    functions: EnvironmentSetup, classes: EnvironmentSetup
) -> None:
    first = in_pool(functions, lambda pool: pool.start())[0]
    assert first == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a"],
            },
        },
    }
    names = [one["function"]["name"] for one in in_pool(classes, lambda pool: pool.start())]
    assert names == ["count", "echo"]


def test_m10_results_keep_the_order_of_calls_and_extra_calls_are_answered(
    functions: EnvironmentSetup,
) -> None:
    (seen,) = play(
        functions,
        turn(
            ("wait", {"seconds": 0.3}),
            ("add", {"a": 1, "b": 2}),
            ("wait", {"seconds": 0.01}),
            ("add", {"a": 5}),
            malformed=("A call is not valid JSON: '{'.",),
        ),
    )
    assert texts(seen)[:4] == [
        "waited 0.3",
        "3",
        "waited 0.01",
        "Not run: at most 3 calls of a turn are.",
    ]
    assert texts(seen)[4].startswith("A call is not valid JSON: '{'. The tools are: add, ")
    assert [message["tool_call_id"] for message in seen.messages][:4] == ["c0", "c1", "c2", "c3"]
    assert [status.value for status in seen.statuses] == [
        "ok",
        "ok",
        "ok",
        "limit",
        "model_error",
    ]


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("left", "(truncated)...6789"),
        ("right", "0123...(truncated)"),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_m10_the_side_that_is_cut_away(side: TruncateSide, kept: str) -> None:
    assert cut_text("0123456789", 4, side=side) == kept
    assert cut_text("0123", 4, side=side) == "0123"


def test_mistakes_of_the_model_are_answered_and_odd_results_are_texts(
    functions: EnvironmentSetup,
) -> None:
    cases = [
        (("nothing", {}), "Unknown tool 'nothing'. The tools are:", ToolStatus.MODEL_ERROR),
        (("add", {}), "The arguments of add are wrong: 'a' is missing.", ToolStatus.MODEL_ERROR),
        (("add", {"a": "1"}), "'a' must be of the type integer", ToolStatus.MODEL_ERROR),
        (("add", {"a": None}), "'a' must be of the type integer", ToolStatus.MODEL_ERROR),
        (("add", {"a": 1, "c": 1}), "there is no 'c'", ToolStatus.MODEL_ERROR),
        (("give", {"what": "none"}), "", ToolStatus.OK),
        (("give", {"what": "bytes"}), "abc", ToolStatus.OK),
        (("give", {"what": "dict"}), '{"x": 1}', ToolStatus.OK),
        (("give", {"what": "long"}), "...(truncated)...", ToolStatus.OK),
        (("give", {"what": "reward"}), "text", ToolStatus.OK),
        (("give", {"what": "torch"}), "", ToolStatus.OK),
    ]
    observations = play(functions, *(turn(call) for call, _, _ in cases))
    for (call, text, status), seen in zip(cases, observations, strict=True):
        assert seen.statuses == (status,) and text in texts(seen)[0], (call, seen)
        assert len(texts(seen)[0]) < 200
    assert observations[-2].rewards == (0.25,)
    assert texts(observations[-1]) == [""], "children import neither torch nor transformers"


def test_m14_an_exception_of_a_tool_is_a_failure_that_names_it(functions: EnvironmentSetup) -> None:
    late, raised, odd, fine = play(
        functions,
        turn(("give", {"what": "late"})),
        turn(("give", {"what": "raise"})),
        turn(("give", {"what": "four"})),
        turn(("add", {"a": 1})),
    )
    assert late.statuses == raised.statuses == (ToolStatus.FAILED,)
    assert late.detail.startswith("the tool give: TimeoutError: the backend does not answer")
    line = FUNCTIONS.partition("raise KeyError")[0].count("\n") + 1
    assert raised.detail == f"the tool give: KeyError: 'gone' (functions.py:{line})"
    assert "a tuple of 4 values" in odd.detail
    assert fine.statuses == (ToolStatus.OK,)


def test_m12_hanging_calls_time_out_alone_and_leave_no_process(folder: Path) -> None:
    """A coroutine, and a thread that cannot be ended: its process is replaced."""
    limits = ToolLimits(max_parallel_calls=3, timeout_s=1.5)
    setup = EnvironmentSetup(function_path=str(folder / "functions.py"), limits=limits)
    before = {*psutil.Process().children()}

    async def work(pool: EnvironmentPool) -> list[Observation]:
        sessions = [pool.open(task(number=i)) for i in range(6)]
        calls = [
            turn(("wait", {"seconds": 600}), ("add", {"a": 1})),
            turn(("hang", {"seconds": 600})),
            turn(("add", {"a": 2})),
        ]
        seen = await asyncio.gather(
            *(session.step(calls[i % 3]) for i, session in enumerate(sessions))
        )
        seen += [await sessions[1].step(turn(("add", {"a": 7})))]
        for session in sessions:
            await session.close()
        return seen

    begin_s = time.monotonic()
    seen = in_pool(setup, work, num_processes=2)
    assert time.monotonic() - begin_s < 300, "calls take 600 s"
    for i, one in enumerate(seen[:6]):
        statuses = [status.value for status in one.statuses]
        assert statuses == [["timeout", "ok"], ["timeout"], ["ok"]][i % 3]
    assert texts(seen[1]) == ["No result within 1.5 s."]
    assert texts(seen[6]) == ["8"]
    assert {*psutil.Process().children()} <= before


def test_m13_a_killed_process_fails_only_episodes_with_state(
    classes: EnvironmentSetup, functions: EnvironmentSetup
) -> None:
    async def kill_in_a_call(pool: EnvironmentPool) -> tuple[Observation, Observation]:
        session = pool.open(task())
        (pid,) = texts(await session.step(turn(("give", {"what": "pid"}))))
        waiting = asyncio.create_task(session.step(turn(("wait", {"seconds": 0.5}))))
        await asyncio.sleep(0.1)
        os.kill(int(pid), signal.SIGKILL)
        again = await waiting
        return again, await session.step(turn(("add", {"a": 1})))

    again, later = in_pool(functions, kill_in_a_call)
    assert (texts(again), texts(later)) == (["waited 0.5"], ["2"])

    async def kill_between(pool: EnvironmentPool) -> list[Observation]:
        user = {"name": "strict"}
        before = {*psutil.Process().children()}
        held, fresh = (pool.open(task(number=i, interaction_kwargs=user)) for i in range(2))
        await held.step(turn(("count", {})))
        started = {*psutil.Process().children()} - before
        assert started
        for child in started:
            child.kill()
        return [await held.step(turn(("count", {}))), await fresh.step(turn(("count", {})))]

    lost, fresh = in_pool(classes, kill_between)
    assert lost.statuses == (ToolStatus.FAILED,)
    assert lost.detail.startswith("its state is lost: ")
    assert texts(fresh) == ["1"]


def test_a_stopped_process_is_killed_and_its_step_is_tried_once_more(
    functions: EnvironmentSetup,
) -> None:
    setup = replace(functions, limits=replace(functions.limits, timeout_s=1.5))

    async def stop_in_a_call(pool: EnvironmentPool) -> Observation:
        before = {*psutil.Process().children()}
        await pool.start()
        (started,) = {*psutil.Process().children()} - before
        started.suspend()
        return await pool.open(task()).step(turn(("add", {"a": 1})))

    assert texts(in_pool(setup, stop_in_a_call)) == ["2"]


def test_a_process_that_is_killed_while_it_starts_is_started_once_more(
    functions: EnvironmentSetup,
) -> None:
    with next_children_killed(1):
        assert in_pool(functions, lambda pool: pool.start())
    with (
        next_children_killed(2),
        pytest.raises(RunFailure, match="did not start: process killed by SIGKILL"),
    ):
        in_pool(functions, lambda pool: pool.start())


def test_a_tool_that_ends_its_process_twice_has_failed(functions: EnvironmentSetup) -> None:
    died, fine = play(functions, turn(("give", {"what": "die"})), turn(("add", {"a": 1})))
    assert died.statuses == (ToolStatus.FAILED,)
    assert died.detail == "process ended with exit code 3"
    assert texts(fine) == ["2"]


@pytest.mark.parametrize(
    "message",
    ["garbage", "7", json.dumps(["00" * NUMBER_BYTES, {"messages": [{"content": "forged"}]}])],
)
def test_a_tool_that_writes_to_the_channel_of_its_process_has_failed(
    functions: EnvironmentSetup, message: str
) -> None:
    """An answer has the secret number of its request, which no tool sees."""
    forged, fine = play(
        functions, turn(("give", {"what": f"write {message}"})), turn(("add", {"a": 1}))
    )
    assert forged.statuses == (ToolStatus.FAILED,)
    assert forged.detail == "something wrote to the channel of its process"
    assert texts(fine) == ["2"]


def start(setup: EnvironmentSetup) -> None:
    in_pool(setup, lambda pool: pool.start())


BAD_FUNCTIONS = {
    "x = 1": "has no function with the decorator @function_tool",
    "raise RuntimeError('no')": "does not import: RuntimeError: no",
    "from tandem.agents.verl_names import function_tool\n@function_tool\ndef f(x):\n  'd'\n": (
        "the parameter 'x' of the tool 'f' has no type"
    ),
    "from tandem.agents.verl_names import function_tool\n@function_tool\ndef f(*x):\n  'd'\n": (
        r"the tool 'f' has \*x, which no schema expresses"
    ),
}


@pytest.mark.parametrize("source", BAD_FUNCTIONS)
def test_files_of_functions_that_cannot_be_used(tmp_path: Path, source: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(source)
    with pytest.raises(UserError, match=f"function_tool_path=.*{BAD_FUNCTIONS[source]}"):
        start(EnvironmentSetup(function_path=str(file)))


@pytest.mark.parametrize(
    ("source", "code"), [("import os\nos._exit(5)", 5), ("raise KeyboardInterrupt", 130)]
)
def test_a_process_that_ends_before_it_has_the_tools_is_a_failure_that_names_the_file(
    tmp_path: Path, source: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fatal.py"
    file.write_text(source)
    loads = rf"exit code {code}; it loads actor_.*function_tool_path='{file}'"
    with pytest.raises(RunFailure, match=f"environment process did not start: .* {loads}"):
        start(EnvironmentSetup(function_path=str(file)))
    assert "Traceback" not in capfd.readouterr().err


def test_a_class_that_cannot_be_imported_names_the_class() -> None:
    setup = EnvironmentSetup(tools=(ToolSpec("no_such.Tool", {}, None),))
    with pytest.raises(UserError, match=r"tool_config_path='no_such.Tool': cannot be imported"):
        start(setup)


def test_an_episode_without_steps_needs_no_process() -> None:
    async def work(pool: EnvironmentPool) -> set[psutil.Process]:
        before = {*psutil.Process().children()}
        await pool.open(task()).close()
        return {*psutil.Process().children()} - before

    assert in_pool(EnvironmentSetup(), work) == set()
