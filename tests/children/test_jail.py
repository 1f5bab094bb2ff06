# SPDX-License-Identifier: Apache-2.0
"""What the jail holds: attacks as root, in a container and as an ordinary user (M17, M18, M20).

The processes are real. Identities that this machine does not offer are left out: as an ordinary
user the tests run as that user alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.children import jail, scratch
from tandem.children.code_jail import CodeJail, Execution, ExecutionEnd, JailError
from tandem.children.jail import MIB, JailLimits
from tandem.children.scratch import ScratchPlace
from tests.fakes import attacks, confinement

SYSTEM_PYTHON = "/usr/bin/python3"
LAUNCHER = confinement.__file__
LIMITS = JailLimits(cpu_s=2, wall_s=3.0)
LONG = JailLimits(wall_s=60.0)
FINISHING = JailLimits(cpu_s=60, wall_s=60.0)
"""The limits of programs that end by themselves, however busy the machine is."""
ORDINARY = 1000


@dataclass(frozen=True)
class Identity:
    """Who runs the programs. ``user`` owns the victims."""

    launcher: tuple[str, ...] = ()
    interpreter: str = sys.executable
    user: int | None = None


def _identities() -> dict[str, Identity]:
    found = {"this user": Identity()}
    if os.geteuid() == 0:
        container = (sys.executable, LAUNCHER, "container")
        found["container"] = Identity(container)
        found["root without Landlock"] = Identity((sys.executable, LAUNCHER, "no-landlock"))
        version = ["-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        if shutil.which("setpriv") and _succeeds(SYSTEM_PYTHON, *version):
            # The interpreter of these tests may lie in root's home, which no other user can read.
            found["root with users of its own"] = Identity((), SYSTEM_PYTHON)
            ordinary = ("setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups")
            found["ordinary user"] = Identity(ordinary, SYSTEM_PYTHON, ORDINARY)
    return found


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, check=False).returncode == 0


IDENTITIES = _identities()


@pytest.fixture(scope="module", params=list(IDENTITIES))
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the outcome of each program under an identity, with victims that are checked."""
    identity = IDENTITIES[request.param]
    folder = Path("/tmp") / f"jail-{os.getpid()}-{len(request.param)}"
    with ExitStack() as stack:
        folder.mkdir()
        stack.callback(shutil.rmtree, folder)
        values = stack.enter_context(_victims(folder, identity))

        async def run_all() -> dict[str, Execution]:
            code_jail = CodeJail(
                launcher=identity.launcher,
                interpreter=identity.interpreter,
                # Without Landlock, no program can import them.
                modules=["fcntl", "multiprocessing.shared_memory"],
            )
            async with code_jail:
                missing = [one.name for one in await code_jail.start() if not one.held_by]
                if missing:
                    pytest.skip(f"this kernel does not hold {', '.join(missing)}")
                filled = {k: attacks.fill(text, values) for k, text in attacks.programs().items()}
                runs = (
                    code_jail.execute(text, LIMITS if name in attacks.ENDLESS else FINISHING)
                    for name, text in filled.items()
                )
                return dict(zip(filled, await asyncio.gather(*runs), strict=True))

        result = asyncio.run(run_all())
        victim = psutil.Process(values["VICTIM"])
        assert victim.is_running() and victim.nice() == os.nice(0)
        assert (folder / "own").read_text() == "mine"
        assert (folder / "own").stat().st_mode & 0o777 == 0o600
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            ["own", "secret", "stream", "datagram"]
        )
        yield result


class _victims:
    """Sockets, files and a process that attacks are aimed at."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._folder, self._identity = folder, identity
        self._stack = ExitStack()

    def __enter__(self) -> dict[str, Any]:
        enter = self._stack.enter_context
        tcp = enter(socket.create_server(("127.0.0.1", 0)))
        streams = enter(socket.socket(socket.AF_UNIX))
        datagrams = enter(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        streams.bind(str(self._folder / "stream"))
        streams.listen()
        datagrams.bind(str(self._folder / "datagram"))
        victim = enter(subprocess.Popen(["sleep", "600"], user=self._identity.user))
        self._stack.callback(victim.kill)
        (self._folder / "secret").write_text("secret")
        (self._folder / "own").write_text("mine")
        for path in self._folder.iterdir():
            path.chmod(0o777 if path.is_socket() else 0o600)
        if self._identity.user is not None:
            for path in (self._folder, self._folder / "own"):
                os.chown(path, self._identity.user, self._identity.user)
        return {
            "TCP": tcp.getsockname()[1],
            "UNIX": self._folder / "stream",
            "DATAGRAM": self._folder / "datagram",
            "FOLDER": self._folder,
            "OWN": self._folder / "own",
            "SECRET": self._folder / "secret",
            "CODE": jail.__file__,
            "VICTIM": victim.pid,
            "SHARED": 0,
        }

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@pytest.mark.parametrize("name", attacks.ESCAPES)
def test_m17_an_attack_is_held(outcomes: dict[str, Execution], name: str) -> None:
    assert attacks.last_list(outcomes[name].output) == ["held", []], outcomes[name].output


@pytest.mark.parametrize("name", attacks.BOUNDED)
def test_m17_an_amount_is_bounded(outcomes: dict[str, Execution], name: str) -> None:
    _, expected = attacks.BOUNDED[name]
    assert attacks.last_list(outcomes[name].output) == expected, outcomes[name].output


@pytest.mark.parametrize("name", attacks.ENDLESS)
def test_m17_an_endless_program_is_ended(outcomes: dict[str, Execution], name: str) -> None:
    _, expected = attacks.ENDLESS[name]
    assert outcomes[name].end is ExecutionEnd(expected)
    assert len(outcomes[name].output) <= LIMITS.output_bytes


def run_in_jail(play: Callable[[CodeJail], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    async def open_and_play() -> Any:
        async with CodeJail(**settings) as code_jail:
            return await play(code_jail)

    return asyncio.run(open_and_play())


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.deep)])
def test_m18_an_execution_costs_little_and_leaves_nothing(count: int) -> None:
    """It may cost 10 ms of the processor, or what an interpreter costs where that is more."""

    others = {one.pid for one in psutil.Process().children(recursive=True)}

    async def play(code_jail: CodeJail) -> tuple[list[Any], list[Any], list[Execution]]:
        await code_jail.execute("pass", LONG)
        before = _traces(others)
        ended = [await code_jail.execute("print(6 * 7)", LONG) for _ in range(count)]
        return before, _traces(others), ended

    before, after, ended = run_in_jail(play)
    assert after == before
    assert {one.output for one in ended} == {"42\n"}
    median_s = statistics.median(one.cpu_s for one in ended)
    assert median_s <= max(0.010, _cpu_s_of_an_interpreter())


def _cpu_s_of_an_interpreter() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(5):
        subprocess.run([sys.executable, "-c", "print(6 * 7)"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 5


def _traces(others: set[int]) -> list[Any]:
    """Return the processes below this one, and the number of descriptors of each.

    Args:
        others: processes that earlier tests have left, such as those of a cluster that tests share.
    """
    gc.collect()  # descriptors that earlier tests have left in cycles
    here = psutil.Process()
    own = (one for one in (here, *here.children(recursive=True)) if one.pid not in others)
    return [(one.pid, one.num_fds()) for one in own]


def test_m18_an_execution_sees_nothing_of_the_one_before() -> None:
    leave = (
        "import os, math, builtins, sys\nos.environ['LEFT'] = '1'\nmath.left = 1\n"
        "builtins.left = 1\nsys.modules['left'] = math\nmine = 1\nprint('done')"
    )
    look = (
        "import os, math, builtins, sys, gc\n"
        "print('LEFT' in os.environ, hasattr(math, 'left'), hasattr(builtins, 'left'),"
        " 'left' in sys.modules, 'mine' in globals(),"
        " any(isinstance(one, str) and 'builtins.left =' in one for one in gc.get_objects()))"
    )

    async def play(code_jail: CodeJail) -> list[str]:
        return [(await code_jail.execute(text, LONG)).output for text in (leave, look)]

    assert run_in_jail(play) == ["done\n", " ".join(["False"] * 6) + "\n"]


@pytest.mark.parametrize(
    ("program", "end", "code", "output"),
    [
        ("print('a'); import sys; sys.exit()", ExecutionEnd.DONE, 0, "a\n"),
        ("import sys; sys.exit('bad')", ExecutionEnd.FAILED, 1, "bad\n"),
        ("import sys; sys.exit(300)", ExecutionEnd.FAILED, 44, ""),
        ("print(input())", ExecutionEnd.FAILED, 1, "EOFError: EOF when reading a line\n"),
        ("print('x'\n", ExecutionEnd.FAILED, 1, "SyntaxError: '(' was never closed\n"),
        ("import os, signal\nos.kill(os.getpid(), 9)", ExecutionEnd.KILLED, -9, ""),
        ("print('\\ud800')", ExecutionEnd.DONE, 0, "?\n"),
        ("import asyncio\nasyncio.run(asyncio.sleep(0))\nprint(1)", ExecutionEnd.DONE, 0, "1\n"),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
            ExecutionEnd.DONE,
            0,
            "late\n",
        ),
        ("print(list({'b', 'a', 'c', 'd'}))", ExecutionEnd.DONE, 0, None),
    ],
)
def test_a_program_ends_as_in_python(
    shared: Callable[[str], Execution], program: str, end: ExecutionEnd, code: int, output: str
) -> None:
    execution = shared(program)
    assert (execution.end, execution.code) == (end, code)
    assert execution.output.endswith(output or "")
    if output is None:
        assert execution.output == shared(program).output, "the order of sets is the same"


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[str], Execution]]:
    """Yield a function that executes programs in one jail."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(90)

    async def make() -> CodeJail:
        return CodeJail()

    code_jail = wait(make())
    yield lambda program: wait(code_jail.execute(program, LONG))
    wait(code_jail.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_tracebacks_show_the_program_and_nothing_else(shared: Callable[[str], Execution]) -> None:
    output = shared("x = 1\nprint('before')\nx / 0").output
    assert output.splitlines()[:4] == [
        "before",
        "Traceback (most recent call last):",
        '  File "program.py", line 3, in <module>',
        "    x / 0",
    ]


def test_a_lost_zygote_is_replaced_and_its_program_run_again() -> None:
    async def play(code_jail: CodeJail) -> str:
        before = psutil.Process().children()
        await code_jail.start()
        waiting = asyncio.create_task(
            code_jail.execute("import time; time.sleep(1); print('ran')", LONG)
        )
        await asyncio.sleep(0.3)
        (zygote,) = set(psutil.Process().children()) - set(before)
        os.kill(zygote.pid, signal.SIGKILL)
        return (await waiting).output

    assert run_in_jail(play) == "ran\n"


def test_a_cancelled_execution_is_killed() -> None:
    async def play(code_jail: CodeJail) -> int:
        before = psutil.Process().children()
        await code_jail.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await code_jail.execute("while True: pass", LONG)
        give_up_at_s = time.monotonic() + 20
        (zygote,) = set(psutil.Process().children()) - set(before)
        while zygote.children() and time.monotonic() < give_up_at_s:
            await asyncio.sleep(0.02)
        return len(zygote.children())

    assert run_in_jail(play) == 0


def test_a_module_that_is_missing_is_an_error() -> None:
    with pytest.raises(JailError, match="no_such_module"):
        run_in_jail(lambda code_jail: code_jail.start(), modules=["no_such_module"])


OWNER = """
import asyncio
from tandem.children.code_jail import CodeJail
from tandem.children.jail import MIB, JailLimits
from tandem.children.scratch import ScratchPlace

DEAF = "import os, signal, time\\nprint(os.getpid(), flush=True)\\n" + "".join(
    f"signal.signal({number}, signal.SIG_IGN)\\n" for number in (1, 2, 15, 29)
) + "while True: time.sleep(1)"

async def main():
    async with CodeJail() as jail:
        await jail.start()
        print("started", flush=True)
        await jail.execute(DEAF, JailLimits(wall_s=120.0))

asyncio.run(main())
"""


def test_nothing_is_left_of_a_killed_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "started\n"
    give_up_at_s = time.monotonic() + 30
    while len(below := psutil.Process(owner.pid).children(recursive=True)) < 2:
        assert time.monotonic() < give_up_at_s, "the program did not start"
        time.sleep(0.05)
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


SCRATCH_LIMITS = JailLimits(wall_s=60.0, scratch_bytes=MIB)
KINDS = [(), *([(sys.executable, LAUNCHER, "no-landlock")] if os.geteuid() == 0 else [])]


@pytest.mark.parametrize("launcher", KINDS)
def test_a_program_with_a_folder_writes_there_and_nowhere_else(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    place = ScratchPlace()
    folder = place.make()
    programs = (
        "import os, tempfile\nos.makedirs('a/b')\nopen('a/b/n', 'w').write('kept')\n"
        "os.rename('a/b/n', 'n')\nos.rmdir('a/b')\n"
        "with tempfile.NamedTemporaryFile('w') as file: file.write('7')\n"
        "print(sorted(os.listdir('.')), os.getcwd() == tempfile.gettempdir())",
        "print(open('n').read())\nopen('n', 'w').write('again')\nprint(open('n').read())",
        f"import os\nfor path in ('../x', '/tmp/x', {str(tmp_path)!r} + '/x', '/dev/shm/x'):\n"
        "    try: open(path, 'w'); print(path)\n    except OSError: pass\n"
        "for act in (lambda: os.symlink('/etc', 'link'), lambda: os.mkfifo('pipe'),\n"
        "        lambda: os.link('/etc/passwd', 'own'), lambda: os.chmod('n', 0o777),\n"
        "        lambda: os.execv('/bin/true', ['true']), lambda: os.listdir('/etc')):\n"
        "    try: act(); print('reached')\n    except OSError: pass",
    )

    async def play(code_jail: CodeJail) -> list[str]:
        return [
            (await code_jail.execute(text, SCRATCH_LIMITS, scratch=folder)).output
            for text in programs
        ]

    try:
        told = run_in_jail(play, launcher=launcher)
    finally:
        place.close()
    # With the folder as root, ".." is the folder itself.
    around = "../x\n" if launcher else ""
    assert told == ["['a', 'n'] True\n", "kept\nagain\n", around]
    assert not os.path.exists(folder) and not os.path.exists(os.path.dirname(folder))


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("for n in range(9): open(str(n), 'w').write('7' * 300_000)", ExecutionEnd.FILES),
        ("for n in range(1200): open(str(n), 'w').close()", ExecutionEnd.FILES),
        ("import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')", ExecutionEnd.FILES),
        ("open('n', 'w').write('7' * (1 << 21))", ExecutionEnd.FAILED),
        ("import os\nos.mkdir('d', 0)\nopen('n', 'w').write('7')", ExecutionEnd.DONE),
    ],
)
def test_the_files_of_a_program_are_limited_and_removed(program: str, end: ExecutionEnd) -> None:
    place = ScratchPlace()
    folder = place.make()

    async def play(code_jail: CodeJail) -> ExecutionEnd:
        slow = program + "\nimport time; time.sleep(100)" * (end is ExecutionEnd.FILES)
        return (await code_jail.execute(slow, SCRATCH_LIMITS, scratch=folder)).end

    try:
        assert run_in_jail(play) is end
    finally:
        place.remove(folder)
    assert not os.path.exists(os.path.dirname(folder))


def test_the_place_of_a_killed_owner_is_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scratch, "_MEMORY", str(tmp_path))
    mine = ScratchPlace()
    (Path(mine.make()) / "n").write_text("7")
    abandoned = tmp_path / "tandem-scratch-abandoned"
    (abandoned / "deep").mkdir(parents=True)
    (abandoned / "deep" / "n").write_text("7")
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    young = tmp_path / "tandem-scratch-young"
    young.mkdir()
    ScratchPlace()
    assert len(list(tmp_path.iterdir())) == 2 and young.exists() and not abandoned.exists()
    mine.close()
    assert list(tmp_path.iterdir()) == [young]


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        # Root changes its root folder instead.
        ("no-landlock", set() if os.geteuid() == 0 else {"files"}),
        # Without the filter, the times and rights of files can be changed.
        ("no-seccomp", {"files", "network", "processes", "tracing", "privileges"}),
    ],
)
def test_m20_what_a_kernel_cannot_hold_is_named(kind: str, lost: set[str]) -> None:
    launcher = (sys.executable, LAUNCHER, kind)
    protections = run_in_jail(lambda code_jail: code_jail.start(), launcher=launcher)
    assert len(protections) == 8
    # Landlock holds signals from version 6 on.
    assert {one.name for one in protections if not one.held_by} - {"signals"} == lost
