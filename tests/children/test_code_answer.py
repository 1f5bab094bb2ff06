# SPDX-License-Identifier: Apache-2.0
"""Programs against their tests: formats, comparison, and programs that attack their judge."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.children.code_jail import survey_protections
from tandem.children.jail_trial import find_layers, lost_protections
from tandem.rewards import code_answer
from tandem.rewards.code_answer import (
    Cases,
    ProgramLimits,
    compute_score,
    count_passed,
    is_right_output,
    is_right_result,
    last_program,
    read_tests,
)
from tests.children.test_code_tool import ownerless_places
from tests.fakes import confinement
from tests.fakes.patience import LIMIT_S, PATIENCE_S, until

LIMITS = ProgramLimits(cpu_s=30, wall_s=LIMIT_S, budget_s=LIMIT_S, memory_mb=256)
SHORT = ProgramLimits(cpu_s=1, wall_s=1.0, budget_s=LIMIT_S, memory_mb=128)
SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
RIGHT = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


def score(text: str, tests: Any, **options: Any) -> float:
    judged = compute_score("apps", text, ground_truth=tests, extra_info={}, **options)
    assert (judged["score"] == 1.0) is (judged["acc"] == 1.0)
    return judged["score"]


def passes(source: str, tests: dict[str, Any], *, limits: ProgramLimits = LIMITS) -> bool:
    return count_passed(source, read_tests(tests), limits=limits) == len(tests["inputs"])


def test_a_program_that_reads_and_prints():
    assert score(RIGHT, SUM) == 1.0
    assert score(RIGHT, json.dumps(SUM)) == 1.0
    assert score("```python\nprint(3)\n```", SUM) == 0.5
    assert score("```python\nprint(3)\n```", SUM, continuous=False) == 0.0
    assert score("I do not know.", SUM) == 0.0


@pytest.mark.parametrize(
    "source",
    [
        "def add(a, b):\n    print('noise')\n    return a + b",
        "class Solution:\n    def add(self, a: int, b) -> Optional[int]:\n        return a + b",
    ],
)
@pytest.mark.parametrize(
    "tests",
    [
        {"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]},
        {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]},
    ],
)
def test_a_function_is_called_with_the_arguments_of_a_test(source: str, tests: dict[str, Any]):
    assert passes(source, tests)
    assert not passes(source.replace("a + b", "a - b"), tests)


def test_a_later_test_counts():
    inputs, outputs = [[n] for n in range(12)], list(range(12))
    tests = Cases(inputs, outputs, "same")
    assert count_passed("def same(n): return n", tests, limits=LIMITS) == 12
    assert count_passed("def same(n): return min(n, 10)", tests, limits=LIMITS) == 11


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nno:\n```python\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```py\na", "a"),
        ("a", "a"),
    ],
)
def test_last_program(text: str, program: str):
    assert last_program(text) == program


@pytest.mark.parametrize(
    ("output", "expected", "is_right"),
    [
        ("3", "3\n", True),
        ("1  2 \n\n3\n", "1 2\n3", True),
        ("0.3333333", "0.33333334", True),
        ("3.0", "3", False),
        ("4", "3", False),
        ("1\n2", "1 2", False),
        ("yes", "YES", False),
        ("nan", "0.5", False),
    ],
)
def test_outputs_are_compared_word_by_word(output: str, expected: str, is_right: bool):
    assert is_right_output(output, expected) is is_right


@pytest.mark.parametrize(
    ("result", "expected", "is_right"),
    [
        ([1, 2], [1, 2], True),
        (3, [3], True),
        (0.1 + 0.2, 0.3, True),
        ({"1": [0.5]}, {"1": [0.5]}, True),
        (True, 1, False),
        ([2, 1], [1, 2], False),
        (None, [], False),
    ],
)
def test_results_of_functions_are_compared_as_json(result: Any, expected: Any, is_right: bool):
    assert is_right_result(result, expected) is is_right


@pytest.mark.parametrize(
    "tests", ["{", {"inputs": []}, {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}]
)
def test_tests_that_cannot_be_read_are_no_zero(tests: Any):
    with pytest.raises(ValueError):
        compute_score("apps", RIGHT, ground_truth=tests, extra_info={})


ATTACKS = {
    "raises": "1 / 0",
    "does not compile": "def (",
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(100)",
    "prints without end": "while True: print('7' * 1000)",
    "writes without end": "import os\nwhile True: os.write(1, b'7' * 65536)",
    "takes memory": "x = bytearray(10 ** 9); print(7)",
    "takes memory piece by piece": "x = []\nwhile True: x.append(bytearray(10 ** 6))",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "takes memory in children": (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n"
        "        x = bytearray(60 * 10 ** 6); time.sleep(100)\ntime.sleep(100); print(7)"
    ),
    "leaves": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "kills the others": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "takes its judge's place": (
        "import os\nfor n in range(3, 200):\n"
        '    try: os.write(n, b\'{"end": "done", "output": "7"}\\n\' * 3)\n'
        "    except OSError: pass"
    ),
    "patches the comparison": (
        "import json, builtins\n"
        "class Equal(int):\n    __eq__ = lambda a, b: True\n    __hash__ = int.__hash__\n"
        "json.dumps = lambda *a, **k: '7'\njson.loads = lambda *a, **k: Equal()\n"
        "builtins.all = lambda *a: True\nbuiltins.map = lambda *a: [True]\n"
        "def add(a, b): return Equal()"
    ),
    "recurses": "def add(a, b): return add(a, b)\nadd(1, 2)",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_give_no_right_answer(name: str):
    for_stdin = {"inputs": ["3 4", "4 4"], "outputs": ["7", "8"]}
    assert not passes(ATTACKS[name], for_stdin, limits=SHORT)


@pytest.mark.parametrize("name", ["leaves", "leaves at once", "patches the comparison", "raises"])
def test_attacks_on_a_function(name: str):
    tests = {"fn_name": "add", "inputs": [[3, 4], [4, 4]], "outputs": [7, 8]}
    assert not passes(ATTACKS[name], tests, limits=SHORT)


def test_a_function_with_a_result_that_is_no_json():
    tests = {"fn_name": "add", "inputs": [[3, 4]], "outputs": [7]}
    source = "class Equal:\n    __eq__ = lambda a, b: True\ndef add(a, b): return Equal()"
    assert not passes(source, tests)


@pytest.fixture
def without_jail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs run as on a kernel that does not hold them."""
    launcher = tmp_path / "python"
    command = [sys.executable, confinement.__file__, "no-seccomp", sys.executable]
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))


needs_jail = pytest.mark.skipif(
    bool(lost_protections(survey_protections())), reason="this kernel does not hold programs"
)


@needs_jail
def test_a_program_is_held_and_has_a_folder(tmp_path: Path):
    (tmp_path / "secret").write_text("7")
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = (
            "import os, socket, tempfile\n"
            "def is_refused(act):\n    try: act()\n    except PermissionError: return True\n"
            f"print(is_refused(lambda: open({str(tmp_path / 'secret')!r})),\n"
            f"    is_refused(lambda: socket.create_connection({server.getsockname()!r})),\n"
            "    is_refused(os.fork), is_refused(lambda: os.kill(os.getppid(), 0)),\n"
            "    is_refused(lambda: open('/proc/self/environ')))\n"
            "with open('notes', 'w') as file: file.write('kept')\n"
            "with tempfile.TemporaryFile('w+') as file: file.write('also')\n"
            "print(open('notes').read(), os.listdir('.'), open('/dev/stdin').read())"
        )
        output = "True True True True True\nkept ['notes'] given"
        assert passes(source, {"inputs": ["given"], "outputs": [output]})


def test_a_program_has_no_environment_and_an_empty_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "1234")
    source = (
        "import os, tempfile\n"
        "print('SECRET' in os.environ)\n"
        "print(len(os.listdir('.')), os.getcwd() == tempfile.gettempdir())"
    )
    tests = {"inputs": ["", ""], "outputs": ["False\n0 True"] * 2}
    assert passes(source + "\nopen('left', 'w').close()", tests)


@pytest.mark.usefixtures("without_jail")
@pytest.mark.parametrize("name", ["forks", "takes memory in children", "kills the others"])
def test_attacks_give_no_right_answer_without_a_jail(name: str):
    tests = {"inputs": ["3 4", "4 4"], "outputs": ["7", "8"]}
    assert not passes(ATTACKS[name], tests, limits=SHORT)


@pytest.mark.usefixtures("without_jail")
def test_the_kernel_limits_the_processes_of_a_program_without_a_jail():
    """The judge counts them, too, but it may get no processor while they multiply."""
    if not find_layers().user:
        pytest.skip("programs have users of their own under root, if these can read Python")
    source = (
        "import os, time\nstarted = 0\ntry:\n    while started < 100:\n"
        "        if os.fork() == 0: time.sleep(100)\n        started += 1\n"
        "except OSError: pass\nprint(0 < started < 17)"
    )
    assert passes(source, {"inputs": [""], "outputs": ["True"]})


@pytest.mark.usefixtures("without_jail")
def test_a_program_without_a_jail_runs_as_before():
    assert passes(last_program(RIGHT), SUM)
    source = "import os\nprint(os.waitpid(os.fork() or os._exit(3), 0)[1] >> 8)"
    assert passes(source, {"inputs": [""], "outputs": ["3"]}), "it may fork"
    source = "import os\nprint(os.sched_getscheduler(0) == os.SCHED_OTHER)"
    assert passes(source, {"inputs": [""], "outputs": ["True"]}), "it does not go before others"


def runners() -> list[psutil.Process]:
    """The interpreters for programs that this process has started."""
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in alive if any("code_program" in word for word in one.cmdline())]


def test_jobs_share_an_interpreter_and_nothing_that_programs_leave_there():
    show = "import builtins\nprint(hasattr(builtins, 'left'))\nbuiltins.left = 1"
    assert passes(show, {"inputs": [""] * 2, "outputs": ["False"] * 2})
    before = runners()
    assert passes(show, {"inputs": [""], "outputs": ["False"]})
    assert before and runners() == before


def test_a_killed_interpreter_is_replaced():
    assert passes(last_program(RIGHT), SUM)
    for runner in runners():
        runner.kill()
    assert passes(last_program(RIGHT), SUM)


def test_threads_have_interpreters_of_their_own():
    with ThreadPoolExecutor(3) as pool:
        judged = [pool.submit(passes, last_program(RIGHT), SUM) for _ in range(6)]
    assert all(each.result() for each in judged)


def test_a_job_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code_answer, "_GRACE_S", -LIMIT_S + 0.5)
    with pytest.raises(RuntimeError, match="did not answer"):
        passes("import time\ntime.sleep(1000)", SUM)
    assert until(lambda: not [each for each in runners() if each.children()])


@pytest.mark.parametrize(
    "fill",
    ["open(str(n), 'w').write('7' * 100_000)", "os.mkdir('d'); os.chdir('d')"],
)
def test_a_program_that_fills_its_folder_is_ended_and_its_files_are_removed(fill: str):
    before = ownerless_places()
    source = f"import os, time\nfor n in range(2000): {fill}\ntime.sleep(100)"
    assert not passes(source, {"inputs": [""], "outputs": [""]}, limits=LIMITS)
    assert until(lambda: not ownerless_places() - before)


def test_a_time_budget_that_is_used_up_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code_answer, "_GRACE_S", LIMIT_S)
    cases = read_tests({"inputs": ["1", "2"], "outputs": ["1", "2"]})
    limits = ProgramLimits(budget_s=0.0)
    assert count_passed("print(input())", cases, limits=limits) == 0


@pytest.mark.usefixtures("without_jail")
def test_nothing_is_left_of_a_program_without_a_jail():
    mark = f"left-{os.getpid()}-{time.monotonic_ns()}"
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execvp('sleep', ['{mark}', '100'])\n    os._exit(0)\nprint(7)"
    )
    assert passes(source, {"inputs": [""], "outputs": ["7"]})
    deadline = time.monotonic() + PATIENCE_S
    while any(mark in "".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "a process of the program is alive"
        time.sleep(0.05)


def test_threads_and_deep_recursion_are_allowed():
    source = (
        "import threading\nthreading.stack_size(2 ** 26)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
        "t = threading.Thread(target=lambda: print(depth(10000)))\nt.start()\nt.join()"
    )
    assert passes(source, {"inputs": [""], "outputs": ["10000"]})
