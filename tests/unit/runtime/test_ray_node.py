# SPDX-License-Identifier: Apache-2.0
"""The end of Ray's processes, as ``ray start`` reports it."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tandem.runtime import ray_node
from tandem.runtime.ray_node import RayNode, RayNodeError, describe_end, start_head
from tests.fakes.patience import until

REPORT = "Some Ray subprocesses exited unexpectedly:"
REST = "Remaining processes will be killed."


@pytest.mark.parametrize(
    ("lines", "code", "end"),
    [
        ([REPORT, "  raylet [exit code=-9]", REST], 1, "its raylet was killed by SIGKILL"),
        ([REPORT, "  gcs_server [exit code=1]", REST], 1, "its gcs_server ended with exit code 1"),
        ([REPORT, "  raylet [exit code=-40]", REST], 1, "its raylet was killed by signal 40"),
        ([], -15, "its raylet or head was killed by SIGTERM"),
    ],
)
def test_the_first_lost_process_is_named(lines: list[str], code: int, end: str) -> None:
    assert describe_end(lines, code) == end


@pytest.mark.parametrize(
    ("program", "text", "is_usage"),
    [
        ("sys.exit(1)", "its raylet or head ended with exit code 1", False),
        ("os.kill(os.getpid(), 9)", "its raylet or head was killed by SIGKILL", False),
        ("print('A port is taken.'); sys.exit(1)", "A port is taken.", False),
        ("print('No such option: --x'); sys.exit(2)", "No such option: --x", True),
    ],
)
def test_a_start_that_fails_says_how(
    program: str, text: str, is_usage: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "_RAY_START", f"import os, sys; {program}")
    with pytest.raises(RayNodeError) as raised:
        start_head({"temp_dir": tmp_path}, role="local", token="")
    assert (str(raised.value).strip(), raised.value.is_usage) == (text, is_usage)
    assert not list(tmp_path.iterdir()), "nothing is left of it"


def test_the_folder_of_a_cluster_is_of_this_user_alone_and_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import os, sys, time
(folder,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--temp-dir=")]
os.makedirs(f"{folder}/session/sockets")
os.chmod(folder, 0o777)
with open(f"{folder}/ray_current_cluster", "w") as file:
    file.write("10.0.0.1:6379")
time.sleep(600)
"""
    monkeypatch.setattr(ray_node, "_RAY_START", program)
    node, address = start_head({"temp_dir": tmp_path}, role="local", token="")
    (folder,) = tmp_path.iterdir()
    assert not node.has_started
    assert address == "10.0.0.1:6379" and folder.stat().st_mode & 0o777 == 0o700
    assert len(f"/{folder.name}/ray/") == len("/tandem-ray-12345678/ray/")
    assert (folder / "ray").is_dir()
    node.close()
    assert not folder.exists()


def test_a_folder_for_temporary_files_with_a_long_path_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = "import sys; print([word for word in sys.argv if '--temp-dir' in word]); sys.exit(1)"
    monkeypatch.setattr(ray_node, "_RAY_START", program)
    long, short = tmp_path / ("long" * 20), Path("/tmp")
    long.mkdir()
    for place, used in ((long, short), (short, short)):
        caplog.clear()
        monkeypatch.setattr(ray_node.tempfile, "tempdir", str(place))
        with pytest.raises(RayNodeError, match=rf"--temp-dir={used}/tandem-ray-\w+/ray"):
            start_head({}, role="local", token="")
        assert (f"{place}: its path is too long" in caplog.text) == (place != used)


def test_a_folder_of_ray_init_that_does_not_exist_is_not_accepted(tmp_path: Path) -> None:
    with pytest.raises(RayNodeError, match="No such file or directory") as raised:
        start_head({"temp_dir": tmp_path / "missing"}, role="local", token="")
    assert raised.value.is_usage


def test_a_process_that_is_lost_while_ray_starts_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a head is killed: ``ray start`` itself waits for it for a while."""
    head = tmp_path / "gcs_server"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", head)
    program = f"import subprocess, time; subprocess.Popen([{str(head)!r}, '2']); time.sleep(600)"
    monkeypatch.setattr(ray_node, "_RAY_START", program)
    folder = tmp_path / "ray"
    folder.mkdir()
    with pytest.raises(RayNodeError, match="^its gcs_server is gone$"):
        start_head({"temp_dir": folder}, role="local", token="")
    assert not list(folder.iterdir())


def test_ray_ends_with_the_code_of_wrong_usage_after_an_option_that_it_does_not_know(
    tmp_path: Path,
) -> None:
    with pytest.raises(RayNodeError, match="No such option.*no-such") as raised:
        start_head({"temp_dir": tmp_path, "no_such": 1}, role="local", token="")
    assert raised.value.is_usage


def test_several_threads_ask_at_the_same_time_whether_a_process_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raylet = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", raylet)
    program = f"import subprocess; subprocess.run([{str(raylet)!r}, '600'])"
    monkeypatch.setattr(ray_node, "_RAY_START", program)
    with closing(RayNode({}, role="local", token="")) as node:
        (child,) = until(psutil.Process(node.process.pid).children)
        until(lambda: child.name() == "raylet")
        node.watch_processes()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: node.describe_end(), range(4000)))
        assert set(answers) == {""}
        child.kill()
        assert until(node.describe_end)
