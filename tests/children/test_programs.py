# SPDX-License-Identifier: Apache-2.0
"""Agents that are programs: their file, commands with their processes, functions in children."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.agents.agent_files import read_agent_file
from tandem.agents.pool import EnvironmentPool
from tandem.agents.programs import Programs, without_proxy
from tandem.agents.setup import Access, EnvironmentSetup, ProgramEnd, ProgramSpec, Task
from tandem.errors import UserError

ACCESS = Access("http://127.0.0.1:9/v1", "key", "policy")
FUNCTIONS = r"""
import asyncio, decimal, functools, os, signal, time

async def solve(task, endpoint, bonus=0.0):
    assert endpoint.api_key == "key"
    return {"reward": len(task.messages) + bonus}

def plain(task, endpoint):
    return 0.5

async def stumble(task, endpoint):
    raise KeyError("x")

async def linger(task, endpoint):
    await asyncio.sleep(600)

def hang(task, endpoint):
    time.sleep(600)

async def die(task, endpoint):
    os.kill(os.getpid(), signal.SIGKILL)

def timed(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

@timed
async def decorated(task, endpoint):
    await asyncio.sleep(0.01)
    return 0.75

class Solver:
    async def __call__(self, task, endpoint):
        await asyncio.sleep(0.01)
        return 0.25

solver = Solver()

async def pages(task, endpoint):
    yield 1.0

class PanicException(BaseException):
    pass

async def _cancelled():
    raise asyncio.CancelledError

def cancelled(task, endpoint):
    asyncio.run(_cancelled())

async def cancelled_later(task, endpoint):
    await _cancelled()

def panics(task, endpoint):
    raise PanicException("index out of bounds")

async def panics_later(task, endpoint):
    raise PanicException("index out of bounds")

def exits(task, endpoint):
    raise SystemExit("bad input")

async def exits_later(task, endpoint):
    raise SystemExit("bad input")

async def rests(task, endpoint):
    await asyncio.sleep(1.0)
    return 1.0

async def keyed(task, endpoint):
    return {"reward": 1.0, ("a", 1): 2.0}

def circular(task, endpoint):
    found = {"reward": 1.0}
    found["state"] = found
    return found

async def half_emoji(task, endpoint):
    raise ValueError("so happy \ud83d")

def gives_numbers(task, endpoint):
    import numpy
    return {"reward": numpy.float32(0.5), "steps": numpy.int64(3), "solved": numpy.bool_(True),
        "scores": numpy.arange(2), "cost": decimal.Decimal("0.25")}

async def gives_number(task, endpoint):
    import numpy
    return numpy.float32(0.5)

def takes_one(task):
    pass

class Loop:
    pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("agents")
    (made / "made_agents.py").write_text(FUNCTIONS)
    return made


INDEX = {"index": 3}


def task_of(number: int = 0, *, size: int = 1, extra_info: Mapping[str, Any] = INDEX) -> Task:
    message = {"role": "user", "content": "q" * size}
    return Task((message,), "s", extra_info, seed=7, episode_id=(7, number), tools=())


def python(source: str, name: str = "cmd") -> ProgramSpec:
    return ProgramSpec(name, argv=(sys.executable, "-c", source))


def run(
    folder: Path,
    *specs: ProgramSpec,
    timeout_s: float = 30.0,
    size: int = 1,
    extra_info: Mapping[str, Any] = INDEX,
) -> list[ProgramEnd | None]:
    """Run an episode of each agent; the result of one that is stopped is None."""

    async def main() -> list[ProgramEnd | None]:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
        pool = EnvironmentPool(
            EnvironmentSetup(programs=specs, log=str(folder / "log")),
            num_processes=1,
            environment=variables,
        )
        async with pool:
            named = {spec.name: spec for spec in specs}
            programs = Programs(named, pool=pool, environment=variables, log=folder / "log")

            async def play(number: int, name: str) -> ProgramEnd | None:
                task = task_of(number, size=size, extra_info=extra_info)
                try:
                    async with asyncio.timeout(timeout_s):
                        return await programs.run(name, task, access=ACCESS)
                except TimeoutError:
                    return None

            if any(spec.target for spec in specs):
                await pool.start()
            return list(await asyncio.gather(*(play(i, name) for i, name in enumerate(named))))

    # The processes of the pool import from sys.path as it is here.
    sys.path.append(str(folder))
    try:
        return asyncio.run(main())
    finally:
        sys.path.remove(str(folder))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_command_gets_its_task_and_the_endpoint_and_gives_a_reward(folder: Path) -> None:
    source = """
import json, os, sys
task = json.load(sys.stdin)
assert task == json.loads(os.environ["TANDEM_TASK"])
assert "127.0.0.1" in os.environ["NO_PROXY"]
print("some text")
print(json.dumps({"reward": 1, "task": task, "url": os.environ["OPENAI_BASE_URL"],
    "key": os.environ["OPENAI_API_KEY"]}))
"""
    (end,) = run(folder, python(source))
    assert end is not None and end.failure == ""
    assert end.returned == {
        "reward": 1,
        "url": ACCESS.base_url,
        "key": ACCESS.api_key,
        "task": {
            "messages": [{"role": "user", "content": "q"}],
            "data_source": "s",
            "extra_info": {"index": 3},
            "seed": 7,
            "episode_id": [7, 0],
        },
    }


def test_a_task_that_is_too_long_for_a_variable_is_on_standard_input(folder: Path) -> None:
    source = """
import json, os, sys
assert "TANDEM_TASK" not in os.environ
print(json.dumps({"reward": len(json.load(sys.stdin)["messages"][0]["content"])}))
"""
    (end,) = run(folder, python(source), size=300_000)
    assert end is not None and end.returned == {"reward": 300_000}


ENDS: list[tuple[ProgramSpec, str]] = [
    (python("print('no object')"), ""),
    (python("import sys; sys.stdin.close(); print('x' * 10_000_000)"), ""),
    (python("raise KeyError('x')"), "ended with exit code 1: KeyError: 'x'"),
    (python("import os; os.kill(os.getpid(), 9)"), "killed by SIGKILL"),
    (ProgramSpec("gone", argv=("/no/such/command",)), "/no/such/command cannot be started: "),
]


@pytest.mark.parametrize(("spec", "failure"), ENDS)
def test_a_command_that_fails_says_how(folder: Path, spec: ProgramSpec, failure: str) -> None:
    (end,) = run(folder, spec)
    assert end is not None and end.returned is None
    assert end.failure.startswith(failure) and bool(end.failure) == bool(failure)
    if "KeyError" in failure:
        assert "KeyError: 'x'" in (folder / "log").read_text()


def test_numbers_of_a_task_that_json_lacks_are_null(folder: Path) -> None:
    source = """
import json, os, sys
def refuse(name):
    raise ValueError(name)
task = json.loads(sys.stdin.readline(), parse_constant=refuse)
assert task == json.loads(os.environ["TANDEM_TASK"], parse_constant=refuse)
print(json.dumps({"reward": 1, "found": task["extra_info"]}))
"""
    prices = {"price": math.nan, "bounds": [1.5, math.inf, (-math.inf,)], "of": {"x": math.nan}}
    (end,) = run(folder, python(source), extra_info=prices)
    found = {"price": None, "bounds": [1.5, None, [None]], "of": {"x": None}}
    assert end == ProgramEnd({"reward": 1, "found": found})


def test_ends_of_lines_in_a_text_of_json_end_no_line(folder: Path) -> None:
    source = r"""
import json, sys
sys.stdout.reconfigure(encoding="utf-8")
print("progress 10%\rprogress 20%\r", end="")
print(json.dumps({"reward": 1.0, "text": "a\u2028b\u2029c\x85d"}, ensure_ascii=False))
"""
    (end,) = run(folder, python(source))
    assert end == ProgramEnd({"reward": 1.0, "text": "a\u2028b\u2029c\x85d"})


def test_a_last_line_of_a_mebibyte_is_read_whole(folder: Path) -> None:
    source = "import json; print(json.dumps({'reward': 1.0, 'log': 'x' * (2**20 - 40)}))"
    (end,) = run(folder, python(f"print('y' * 5_000_000)\n{source}"))
    assert end is not None and end.returned["reward"] == 1.0
    assert len(end.returned["log"]) == 2**20 - 40


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("import json; print(json.dumps({'reward': 1.0}, indent=2))", "its last line begins with"),
        ("print('{\"reward\": 1.0}'); print('bye' * 100)", "its last line begins with 'byebye"),
        ("print('[1]')", "its last line begins with '[1]'"),
        ("pass", "it printed nothing"),
    ],
)
def test_a_command_that_gives_no_reward_on_its_last_line_hears_what_is_expected(
    folder: Path, source: str, shown: str
) -> None:
    (end,) = run(folder, replace(python(source), gives_reward=True))
    assert end is not None and end.failure.startswith(shown) and len(end.failure) < 250
    expected = 'the last line must be one whole object in JSON, such as {"reward": 1.0}'
    assert end.failure.endswith(expected)


def test_a_command_and_its_children_are_killed_at_the_deadline(folder: Path) -> None:
    before = children()
    source = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""
    began_s = time.monotonic()
    assert run(folder, python(source), timeout_s=1.0) == [None]
    assert time.monotonic() - began_s < 30
    assert children() <= before


def test_a_child_that_a_command_leaves_behind_is_killed_with_it(folder: Path) -> None:
    source = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"reward": 1}')
"""
    (end,) = run(folder, python(source))
    assert end is not None and end.returned == {"reward": 1}


@pytest.mark.parametrize("ends", [True, False])
def test_a_child_in_a_session_of_its_own_is_killed_with_its_command(
    folder: Path, ends: bool
) -> None:
    note = folder / f"pid-{ends}"
    source = f"""
import subprocess, sys, time
source = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', " \\
    "'import time; time.sleep(600)'], start_new_session=True).pid, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", source], stdout=-1, start_new_session=True)
open({str(note)!r}, "w").write(f"{{child.pid}} {{int(child.stdout.readline())}}")
{"sys.exit(3)" if ends else "time.sleep(600)"}
"""
    (end,) = run(folder, python(source), timeout_s=60.0 if ends else 5.0)
    assert end == (ProgramEnd(failure="ended with exit code 3") if ends else None)
    assert not any(map(psutil.pid_exists, map(int, note.read_text().split())))


def function(name: str, **arguments: float) -> ProgramSpec:
    return ProgramSpec(name, target=f"made_agents.{name}", arguments=arguments)


def test_functions_play_many_episodes_in_one_process(folder: Path) -> None:
    specs = [function("solve", bonus=0.25), function("plain"), function("stumble")]
    solved, plain, stumbled = run(folder, *specs)
    assert solved == ProgramEnd({"reward": 1.25}) and plain == ProgramEnd(0.5)
    assert stumbled is not None and stumbled.failure == "KeyError: 'x' (made_agents.py:12)"
    assert "KeyError" in (folder / "log").read_text()


def test_a_decorated_coroutine_and_an_object_with_one_are_awaited(folder: Path) -> None:
    decorated, solver, pages = run(folder, *map(function, ("decorated", "solver", "pages")))
    assert (decorated, solver) == (ProgramEnd(0.75), ProgramEnd(0.25))
    cause = "TypeError: it returned an object of the type async_generator, which nothing runs"
    assert pages is not None and pages.failure.startswith(cause)


def test_an_agent_that_ends_by_what_is_no_exception_fails_at_once_and_alone(folder: Path) -> None:
    kinds = {"cancelled": "CancelledError", "panics": "PanicException: index out of bounds"}
    kinds["exits"] = "SystemExit: bad input"
    causes = {name + later: cause for name, cause in kinds.items() for later in ("", "_later")}
    *failed, beside = run(folder, *map(function, (*causes, "rests")))
    for (name, cause), end in zip(causes.items(), failed, strict=True):
        assert end is not None and end.failure.startswith(f"RuntimeError: {cause}"), name
    assert beside == ProgramEnd(1.0), "the process lives"


def test_what_cannot_be_sent_fails_its_episode_alone(folder: Path) -> None:
    causes = {
        "keyed": "TypeError: what it returned cannot be written as JSON: keys must be str",
        "circular": "TypeError: what it returned cannot be written as JSON: Circular reference",
        "half_emoji": r"ValueError: so happy \ud83d",
    }
    *failed, beside = run(folder, *map(function, (*causes, "rests")))
    for cause, end in zip(causes.values(), failed, strict=True):
        assert end is not None and end.failure.startswith(cause)
    assert beside == ProgramEnd(1.0), "the process lives"


def test_numbers_of_numpy_and_other_libraries_are_rewards(folder: Path) -> None:
    several, one = run(folder, function("gives_numbers"), function("gives_number"))
    numbers = {"reward": 0.5, "steps": 3.0, "solved": 1.0, "scores": "[0 1]", "cost": 0.25}
    assert (several, one) == (ProgramEnd(numbers), ProgramEnd(0.5))


@pytest.mark.parametrize("name", ["linger", "hang"])
def test_a_function_that_takes_too_long_is_stopped(folder: Path, name: str) -> None:
    before = children()
    assert run(folder, function(name), timeout_s=2.0) == [None]
    assert children() <= before


def test_m13_the_death_of_a_process_fails_its_episodes(folder: Path) -> None:
    (end,) = run(folder, function("die"))
    assert end is not None and "killed by SIGKILL" in end.failure


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("made_agents.nothing", "made_agents.nothing cannot be imported: AttributeError"),
        ("no_such_module.solve", "cannot be imported: ModuleNotFoundError"),
        ("made_agents.takes_one", r"cannot be called with \(task, endpoint, \*\*fields\)"),
        ("made_agents.Loop", "is a class, and an agent is a function"),
    ],
)
def test_a_function_that_is_none_is_refused_before_training(
    folder: Path, target: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(folder, ProgramSpec("mine", target=target))


FILES = [
    ("{}", "is not a list of agents"),
    ("[]", "is not a list of agents"),
    ("- {name: a}", "entry 0: has neither kind nor a _target_"),
    ("- {_target_: a.b}", "entry 0: has no name"),
    ("- {name: a, kind: docker}", "entry 0: the kind 'docker' is not built; it may be command"),
    ("- {name: a, kind: command}", "entry 0: argv is not a list of texts"),
    ("- {name: a, kind: command, argv: [no-such-program]}", "'no-such-program' is not found"),
    ("- {name: a, kind: command, argv: [ls], x: 1}", "entry 0: has an unknown field 'x'"),
    ("- {name: a, _target_: a.b, reward: mine}", "reward='mine' is neither function nor agent"),
    ("- {name: a, _target_: a.b, max_running: 0}", "max_running=0 is not a number above 0"),
    ("- {name: a, _target_: a.b, max_running: yes}", "max_running=True is not a number above 0"),
    ("- {name: a, kind: command, argv: [ls], processes: 0}", "processes=0 is not a number above 0"),
    ("- {name: a, kind: command, argv: [ls], processes: x}", "processes='x' is not a number above"),
    ("- {name: a, _target_: a.b}\n- {name: a, _target_: a.b}", "entry 1: the name 'a' is taken"),
    ("- {name: a, kind: command, argv: [ls], 1: 2, x: 1}", "entry 0: has an unknown field 1"),
    ("- {name: a, kind: command, reward: [1]}", r"reward=\[1\] is neither function nor agent"),
    ("- {name: a, _target_: a.b, reward: {}}", "reward={} is neither function nor agent"),
    ("- {name: a, _target_: a.b, 1: 2}", "entry 0: has a field whose name is no text"),
    ("- &a {name: a, _target_: a.b, of: *a}", "is not valid YAML .a value contains itself"),
    ("- {name: a", "is not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_file_of_agents_with_an_error_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "agents.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_agent_file(str(file))
    assert "\n" not in str(caught.value)


def test_a_file_of_agents_is_read(tmp_path: Path) -> None:
    file = tmp_path / "agents.yaml"
    entries = [
        {"name": "mine", "_target_": "pkg.module.solve", "bonus": 2, "reward": "agent"},
        {"name": "other", "kind": "command", "argv": ["ls", "-l"], "max_running": 3},
        {"name": "many", "kind": "command", "argv": ["ls"], "processes": 2},
    ]
    file.write_text(json.dumps(entries))
    assert read_agent_file(str(file)).programs == (
        ProgramSpec("mine", target="pkg.module.solve", arguments={"bonus": 2}, gives_reward=True),
        ProgramSpec("other", argv=("ls", "-l"), max_running=3),
        ProgramSpec("many", argv=("ls",), num_processes=2),
    )
    with pytest.raises(UserError, match="no such file"):
        read_agent_file(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(("given", "expected"), [({}, "127"), ({"no_proxy": "a"}, "a,127")])
def test_no_proxy_stands_before_the_endpoint(given: dict[str, str], expected: str) -> None:
    assert without_proxy(given)["NO_PROXY"].startswith(expected)


def test_a_last_line_that_nests_too_deep_is_no_object(folder: Path) -> None:
    """Degenerate text of the policy."""
    assert run(folder, python("print('[' * 100_000)")) == [ProgramEnd()]
