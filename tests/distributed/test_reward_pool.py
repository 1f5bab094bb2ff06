# SPDX-License-Identifier: Apache-2.0
"""The reward pool against rewards that hang, crash, raise, lie and eat memory."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.errors import RunFailure, UserError
from tandem.rewards.custom import RewardFunction
from tandem.rewards.pool import RewardLimits, RewardPool, check_reward
from tandem.rewards.scoring import RewardSpec
from tandem.types import RewardOutcome, RewardRequest, RewardStatus
from tests.fakes.killing import next_children_killed
from tests.fakes.meddling import MEDDLING
from tests.fakes.patience import LIMIT_S, PATIENCE_S

UNRULY = """
import asyncio, os, signal, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    word, _, rest = solution_str.partition(" ")
    if word == "hang":
        while True:
            pass
    if word == "exit":
        os._exit(3)
    if word == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "quit":
        sys.exit(1)
    if word == "raise":
        raise KeyError("no such thing")
    if word == "nan":
        return float("nan")
    if word == "hog":
        return len(bytearray(1 << 30))
    if word == "sleep":
        time.sleep(float(rest))
    if word == "note":
        with open(rest, "a") as file:
            file.write("x")
        time.sleep(0.01)
    if word == "child":
        return subprocess.Popen(["sleep", "100"]).pid
    if word == "modules":
        return float(any(name in sys.modules for name in ("torch", "pydantic", "numpy")))
    if word == "print":
        print("from the reward")
    return float(len(solution_str))

met = []

async def concurrent(data_source, solution_str, ground_truth, extra_info):
    word, _, rest = solution_str.partition(" ")
    if word == "wait":
        await asyncio.sleep(float(rest))
        return 1.0
    if word == "meet":
        met.append(word)
        while len(met) < int(rest):
            await asyncio.sleep(0.01)
        return 1.0
    while word == "until" and not os.path.exists(rest):
        await asyncio.sleep(0.01)
    return compute_score(data_source, solution_str, ground_truth, extra_info)
"""
DETAILS = {
    "hang": (RewardStatus.TIMEOUT, "no result within 4 s"),
    "exit": (RewardStatus.ERROR, "process ended with exit code 3"),
    "segfault": (RewardStatus.ERROR, "process killed by SIGSEGV"),
    "quit": (RewardStatus.ERROR, "SystemExit: 1 (unruly.py:14)"),
    "raise": (RewardStatus.ERROR, "KeyError: 'no such thing' (unruly.py:16)"),
    "nan": (RewardStatus.ERROR, "returned nan (float), not a finite number"),
}


@pytest.fixture
def spec(tmp_path: Path) -> RewardSpec:
    return unruly_spec(tmp_path, "compute_score")


@pytest.fixture
def concurrent_spec(tmp_path: Path) -> RewardSpec:
    return unruly_spec(tmp_path, "concurrent")


def unruly_spec(folder: Path, name: str) -> RewardSpec:
    file = folder / "unruly.py"
    file.write_text(UNRULY)
    return RewardSpec((RewardFunction(str(file), name),))


def limits(
    num_processes: int = 2, deadline_s: float = 20.0, memory_limit_bytes: int | None = None
) -> RewardLimits:
    return RewardLimits(num_processes, deadline_s, memory_limit_bytes)


def request(solution: str) -> RewardRequest:
    return RewardRequest("my/task", solution, "12", {}, num_tokens=1)


def score_all(spec: RewardSpec, solutions: list[str], limits: RewardLimits) -> list[RewardOutcome]:
    async def work() -> list[RewardOutcome]:
        async with RewardPool(spec, limits) as pool:
            return await pool.score([request(solution) for solution in solutions])

    return asyncio.run(work())


def in_pool(
    spec: RewardSpec,
    limits: RewardLimits,
    work: Callable[[RewardPool], Coroutine[Any, Any, Any]],
) -> Any:
    async def main() -> Any:
        async with RewardPool(spec, limits) as pool:
            return await work(pool)

    return asyncio.run(main())


def eventually(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def children_before() -> list[psutil.Process]:
    """Of this process before the test: of other tests, which may end meanwhile."""
    return psutil.Process().children()


def test_many_requests_keep_their_order_and_no_process_is_left(
    spec: RewardSpec, children_before: list[psutil.Process]
):
    outcomes = score_all(spec, ["x" * (i % 50) for i in range(300)], limits())
    assert [outcome.score for outcome in outcomes] == [i % 50 for i in range(300)]
    assert all(outcome.extra == {"acc": outcome.score} for outcome in outcomes)
    assert {*psutil.Process().children()} <= {*children_before}


def test_built_in_rules_need_no_custom_function():
    async def work(pool: RewardPool) -> list[RewardOutcome]:
        rows = [RewardRequest("openai/gsm8k", f"#### {i}", "7", {}, 5) for i in range(9)]
        return await pool.score(rows)

    outcomes = in_pool(RewardSpec(), limits(), work)
    assert [outcome.score for outcome in outcomes] == [0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert [outcome.prediction for outcome in outcomes] == list("012345678")


def test_concurrent_callers_get_their_own_outcomes(spec: RewardSpec):
    async def work(pool: RewardPool) -> list[list[RewardOutcome]]:
        return await asyncio.gather(*(pool.score([request("x" * i)] * (i % 3)) for i in range(60)))

    for i, outcomes in enumerate(in_pool(spec, limits(), work)):
        assert [outcome.score for outcome in outcomes] == [i] * (i % 3)


@pytest.mark.parametrize("word", sorted(DETAILS))
def test_only_the_offender_fails(spec: RewardSpec, word: str):
    outcomes = score_all(spec, ["x"] * 5 + [word] + ["xx"] * 5, limits(1, deadline_s=4.0))
    offender = outcomes.pop(5)
    assert (offender.status, offender.detail) == DETAILS[word]
    assert [outcome.score for outcome in outcomes] == [1.0] * 5 + [2.0] * 5


def test_a_tenth_of_failures_mixed(spec: RewardSpec):
    words = ["hang", "exit", "raise", "nan", "segfault", "quit"]
    solutions = [words[i // 10] if i % 10 == 7 else "x" * i for i in range(60)]
    outcomes = score_all(spec, solutions, limits(deadline_s=4.0))
    for i, (solution, outcome) in enumerate(zip(solutions, outcomes, strict=True)):
        if i % 10 == 7:
            assert (outcome.status, outcome.detail) == DETAILS[solution]
        else:
            assert (outcome.status, outcome.score) == (RewardStatus.VALUE, i)


def test_memory_hog_is_stopped(spec: RewardSpec):
    hog, other = score_all(spec, ["hog", "x"], limits(1, memory_limit_bytes=512 << 20))
    assert hog.status is RewardStatus.ERROR
    assert hog.detail.startswith("MemoryError")
    assert other.score == 1.0


def test_children_import_neither_torch_nor_config(spec: RewardSpec):
    assert score_all(spec, ["modules"], limits(1))[0].score == 0.0


def test_a_slow_reward_within_the_deadline_of_a_busy_loop(spec: RewardSpec):
    """A loop that was blocked for longer than the deadline must not blame the rewards for it."""

    async def work(pool: RewardPool) -> list[RewardOutcome]:
        await pool.start()
        scoring = asyncio.create_task(pool.score([request("sleep 0.1")] * 6))
        await asyncio.sleep(0.05)
        time.sleep(4.1)  # noqa: ASYNC251
        return await scoring

    outcomes = in_pool(spec, limits(1, deadline_s=4.0), work)
    assert [outcome.status for outcome in outcomes] == [RewardStatus.VALUE] * 6


def test_the_deadline_starts_anew_for_each_call(spec: RewardSpec):
    async def work(pool: RewardPool) -> list[RewardOutcome]:
        outcomes = []
        for _ in range(3):
            outcomes += await pool.score([request("sleep 1.5")])
        return outcomes

    outcomes = in_pool(spec, limits(1, deadline_s=4.0), work)
    assert [outcome.status for outcome in outcomes] == [RewardStatus.VALUE] * 3


def test_coroutine_functions_wait_together(concurrent_spec: RewardSpec):
    """Each ends only when all have begun."""
    outcomes = score_all(concurrent_spec, ["meet 40"] * 40, limits(1, deadline_s=LIMIT_S))
    assert [outcome.score for outcome in outcomes] == [1.0] * 40


def test_a_coroutine_function_takes_a_call_while_another_waits(
    concurrent_spec: RewardSpec, tmp_path: Path
):
    """The first call ends only when the second has been scored, in the only process."""
    mark = tmp_path / "mark"

    async def work(pool: RewardPool) -> list[RewardOutcome]:
        waiting = asyncio.create_task(pool.score([request(f"until {mark}")]))
        await asyncio.sleep(0)
        second = await pool.score([request(f"note {mark}")])
        return [*await waiting, *second]

    outcomes = in_pool(concurrent_spec, limits(num_processes=1, deadline_s=60), work)
    assert [outcome.status for outcome in outcomes] == [RewardStatus.VALUE] * 2


def test_a_batch_function_scores_a_call_at_once_and_fails_as_one(tmp_path: Path):
    file = tmp_path / "batch.py"
    file.write_text(
        "def f(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [len(solution_strs) / (len(one) - 1) for one in solution_strs]\n"
    )
    spec = RewardSpec((RewardFunction(str(file), "f"),))

    async def work(pool: RewardPool) -> list[list[RewardOutcome]]:
        calls = [["xx", "xxx"], ["x", "xx", "xxx"], ["xxx"]]
        return await asyncio.gather(*(pool.score([*map(request, call)]) for call in calls))

    good, bad, last = in_pool(spec, limits(), work)
    assert [outcome.score for outcome in good + last] == [2.0, 1.0, 0.5]
    assert len(bad) == 3
    assert all(re.fullmatch(r"Zero.* by zero \(batch\.py:2\)", one.detail) for one in bad)


def test_the_log_has_prints_and_the_first_traceback(spec: RewardSpec, tmp_path: Path):
    log = tmp_path / "rewards.log"
    own = RewardLimits(1, 20.0, log=str(log))
    score_all(spec, ["print", "raise", "raise", "print"], own)
    lines = log.read_text().splitlines()
    assert lines[0] == lines[-1] == "from the reward"
    assert lines[1].startswith("The first error of reward process")
    assert [line for line in lines if "KeyError:" in line] == ["KeyError: 'no such thing'"]


def test_trials_are_made_until_one_has_a_value(spec: RewardSpec):
    asyncio.run(check_reward(spec, limits(), trials=[request("raise"), request("x")]))
    words = r"unruly\.py\]: has no value for the first row .*returned nan .*\(data_source, solution"
    with pytest.raises(UserError, match=words):
        asyncio.run(check_reward(spec, limits(), trials=[request("raise"), request("nan")]))
    with pytest.raises(UserError, match="no result within 0.5 s.*raise reward.timeout_s"):
        asyncio.run(check_reward(spec, limits(deadline_s=0.5), trials=[request("hang")]))


def test_coroutine_that_waits_too_long_times_out_alone(concurrent_spec: RewardSpec):
    solutions = ["wait 0.01", "wait 600", "wait 0.02"]
    outcomes = score_all(concurrent_spec, solutions, limits(1, deadline_s=4.0))
    assert [outcome.score for outcome in (outcomes[0], outcomes[2])] == [1.0, 1.0]
    assert (outcomes[1].status, outcomes[1].detail) == DETAILS["hang"]


@pytest.mark.parametrize("word", ["exit", "hang", "raise"])
def test_offender_among_coroutines_is_found(concurrent_spec: RewardSpec, word: str):
    solutions = ["wait 0.05"] * 2 + [word] + ["wait 0.05"]
    outcomes = score_all(concurrent_spec, solutions, limits(1, deadline_s=4.0))
    offender = outcomes.pop(2)
    assert offender.status is DETAILS[word][0]
    assert [outcome.score for outcome in outcomes] == [1.0] * 3


def test_cancelled_call_is_dropped_and_leaves_the_pool_usable(tmp_path: Path, spec: RewardSpec):
    notes = tmp_path / "notes"

    async def work(pool: RewardPool) -> list[RewardOutcome]:
        await pool.start()
        doomed = asyncio.create_task(pool.score([request(f"note {notes}")] * 200))
        await asyncio.sleep(0.05)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return await pool.score([request("xyz")] * 3)

    outcomes = in_pool(spec, limits(1), work)
    assert [outcome.score for outcome in outcomes] == [3.0] * 3
    assert 0 < notes.stat().st_size < 200


def test_closing_ends_grandchildren_and_waiting_calls(
    spec: RewardSpec, children_before: list[psutil.Process]
):
    async def main() -> int:
        pool = RewardPool(spec, limits(1))
        (child,) = await pool.score([request("child")])
        waiting = asyncio.create_task(pool.score([request("hang")]))
        await asyncio.sleep(0.05)
        await pool.close()
        await pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score([request("x")])
        return int(child.score)

    grandchild = asyncio.run(main())
    assert eventually(lambda: is_gone(grandchild))
    assert {*psutil.Process().children()} <= {*children_before}


PARENT = """
import asyncio, sys
from tandem.rewards.custom import RewardFunction
from tandem.rewards.pool import RewardLimits, RewardPool
from tandem.rewards.scoring import RewardSpec
from tandem.types import RewardRequest

async def main():
    pool = RewardPool(RewardSpec((RewardFunction(sys.argv[1], "compute_score"),)),
                      RewardLimits(2, deadline_s=60))
    request = lambda text: RewardRequest("my/task", text, "12", {}, 1)
    outcomes = await pool.score([request("child"), request("print")])
    print(int(outcomes[0].score), flush=True)
    if sys.argv[2] == "hang":
        await pool.score([request("hang")] * 2)
    await pool.close()

asyncio.run(main())
"""


def test_killed_parent_takes_hanging_children_along(tmp_path: Path, spec: RewardSpec):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, spec.functions[0].path, "hang"], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline())]
    pids += [child.pid for child in psutil.Process(parent.pid).children()]
    time.sleep(0.3)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert len(pids) > 1
    assert eventually(lambda: all(is_gone(pid) for pid in pids))


def test_what_a_reward_prints_stays_out_of_standard_output(spec: RewardSpec):
    done = subprocess.run(
        [sys.executable, "-c", PARENT, spec.functions[0].path, "end"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit()
    assert "from the reward" in done.stderr


def test_check_finds_a_function_that_cannot_be_loaded(
    tmp_path: Path, spec: RewardSpec, children_before: list[psutil.Process]
):
    asyncio.run(check_reward(spec, limits()))
    for path, message in [(tmp_path / "gone.py", "no such file"), (tmp_path, "no such file")]:
        with pytest.raises(UserError, match=rf"custom_reward_function\.path=.*{message}"):
            asyncio.run(check_reward(RewardSpec((RewardFunction(str(path), "f"),)), limits()))
    assert {*psutil.Process().children()} <= {*children_before}


def test_score_reports_a_function_that_cannot_be_loaded(spec: RewardSpec):
    wrong = RewardSpec((RewardFunction(spec.functions[0].path, "not_there"),))
    with pytest.raises(UserError, match="not_there"):
        score_all(wrong, ["x"] * 3, limits())


def test_file_that_ends_its_process_while_it_is_imported(tmp_path: Path):
    file = tmp_path / "fatal.py"
    file.write_text("import os\nos._exit(5)\n")
    with pytest.raises(RunFailure, match="did not start: process ended with exit code 5"):
        asyncio.run(check_reward(RewardSpec((RewardFunction(str(file), "f"),)), limits()))


def test_many_small_calls_are_cheap():
    """No process starts for them, and this one computes little for each."""

    async def work(pool: RewardPool) -> float:
        rows = [RewardRequest("openai/gsm8k", "#### 7", "7", {}, 5)] * 8
        await asyncio.gather(*(pool.score(rows) for _ in range(32)))
        processes = {*psutil.Process().children()}
        started_s = time.process_time()
        for _ in range(5):
            await asyncio.gather(*(pool.score(rows) for _ in range(32)))
        took_s = time.process_time() - started_s
        assert {*psutil.Process().children()} <= processes
        return took_s / 5

    # About 6 ms; a wait by polling, or a look at all calls for each of them, would take longer.
    assert in_pool(RewardSpec(), limits(), work) < 0.2


STRAY = """
import os, signal, stat, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    word, _, rest = solution_str.partition(" ")
    if word == "pid":
        with open(rest, "a") as file:
            file.write(f"{os.getpid()}\\n")
        with open(rest) as file:
            is_first = len(file.readlines()) == 1
        time.sleep(60 if is_first else 0)
    if word == "die":
        with open(rest, "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "write":
        write(rest)
        time.sleep(60)
    was_late, go = (f"{rest}/{name}-{os.getpid()}" for name in ("late", "go"))
    if word == "late":
        open(was_late, "w").close()
        if os.fork() == 0:
            while not os.path.exists(go):
                time.sleep(0.01)
            write("garbage")
            os._exit(0)
    if word == "innocent" and os.path.exists(was_late):
        open(go, "w").close()
        time.sleep(60)
    return 1.0

def write(text):
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.write(int(name), text.encode() + b"\\n")
        except OSError:
            pass
"""


@pytest.mark.parametrize(
    ("word", "num_processes"),
    [
        *((word, 1) for word in ("coroutine", "generator", "descriptors", "limits", "collector")),
        *((word, 1) for word in ("json", "fork", "daemon", "output")),
        *((word, 2) for word in ("fork", "daemon")),
    ],
)
def test_a_function_that_meddles_with_its_process_hurts_no_other(
    word: str, num_processes: int, tmp_path: Path, children_before: list[psutil.Process]
) -> None:
    """Its own sample has the value or an error. (A daemon ends by itself after seconds.)"""
    file = tmp_path / "meddling.py"
    file.write_text(MEDDLING)
    spec = RewardSpec((RewardFunction(str(file), "compute_score"),))
    words = ["x", *[word] * num_processes, *["x"] * num_processes]
    outcomes = score_all(spec, words, limits(num_processes, deadline_s=5.0))
    for asked, outcome in zip(words, outcomes, strict=True):
        is_allowed_to_fail = asked == word and outcome.status is not RewardStatus.VALUE
        assert outcome.detail if is_allowed_to_fail else outcome.score == 1.0
    assert {*psutil.Process().children()} <= {*children_before}


@pytest.fixture
def stray_spec(tmp_path: Path) -> RewardSpec:
    file = tmp_path / "stray.py"
    file.write_text(STRAY)
    return RewardSpec((RewardFunction(str(file), "compute_score"),))


@pytest.mark.parametrize(
    ("number", "deadline_s"),
    [(signal.SIGKILL, 20.0), (signal.SIGTERM, 20.0), (signal.SIGINT, 20.0), (signal.SIGSTOP, 10.0)],
)
def test_a_request_whose_process_is_lost_is_asked_once_more(
    stray_spec: RewardSpec,
    tmp_path: Path,
    number: signal.Signals,
    deadline_s: float,
    capfd: pytest.CaptureFixture[str],
):
    pids = tmp_path / "pids"

    async def work(pool: RewardPool) -> list[RewardOutcome]:
        scored = asyncio.ensure_future(pool.score([request(f"pid {pids}"), request("other")]))
        while not (pids.exists() and pids.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
        os.kill(int(pids.read_text()), number)
        return await scored

    outcomes = in_pool(stray_spec, limits(1, deadline_s), work)
    assert [outcome.score for outcome in outcomes] == [1.0, 1.0]
    assert len(pids.read_text().split()) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_function_that_kills_its_process_runs_twice_and_counts(
    stray_spec: RewardSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """One warning is logged, however often this happens."""
    notes = tmp_path / "notes"
    outcomes = score_all(stray_spec, [f"die {notes}", "other", f"die {notes}"], limits(1))
    error, value = RewardStatus.ERROR, RewardStatus.VALUE
    assert [outcome.status for outcome in outcomes] == [error, value, error]
    assert outcomes[0].detail == "process killed by SIGKILL"
    assert notes.read_text() == "xxxx"
    told = "a reward process ended (process killed by SIGKILL); its call is made once more"
    assert [m for m in caplog.messages if "once more" in m] == [told]


def test_a_call_is_made_once_more_in_a_process_that_has_run_no_other(
    stray_spec: RewardSpec, tmp_path: Path
):
    """Each of two processes has a child that writes to the channel while the next call runs."""

    async def work(pool: RewardPool) -> list[RewardOutcome]:
        await pool.score([request(f"late {tmp_path}")] * 2)
        return await pool.score([request(f"innocent {tmp_path}")])

    outcomes = in_pool(stray_spec, limits(2, PATIENCE_S), work)
    assert len([*tmp_path.glob("late-*")]) == 2
    assert len([*tmp_path.glob("go-*")]) == 1
    assert [outcome.score for outcome in outcomes] == [1.0], outcomes[0].detail


@pytest.mark.parametrize(
    "message", ["garbage", "[]", "7", '[0, [["value", 1.0, {}, "", null, {}]]]', "[" * 100_000]
)
def test_a_foreign_message_on_the_channel_ends_the_process(stray_spec: RewardSpec, message: str):
    outcomes = score_all(stray_spec, [f"write {message}", "other"], limits(1))
    assert outcomes[0].status is RewardStatus.ERROR
    assert outcomes[0].detail == "something wrote to the channel of its reward process"
    assert outcomes[1].score == 1.0


def test_a_process_that_is_killed_while_it_starts_is_started_once_more(
    children_before: list[psutil.Process],
) -> None:
    async def score(pool: RewardPool) -> RewardOutcome:
        (outcome,) = await pool.score([RewardRequest("openai/gsm8k", "#### 7", "7", {}, 5)])
        return outcome

    with next_children_killed(1):
        outcome = in_pool(RewardSpec(), limits(), score)
    assert (outcome.status, outcome.score) == (RewardStatus.VALUE, 1.0)
    with (
        next_children_killed(2),
        pytest.raises(RunFailure, match="did not start: process killed by SIGKILL"),
    ):
        in_pool(RewardSpec(), limits(), score)
    assert {*psutil.Process().children()} <= {*children_before}
