# SPDX-License-Identifier: Apache-2.0
"""Reward functions as files and keys."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tandem.errors import UserError
from tandem.facade.functions import reward_keys
from tests.fakes.rewards import constant, graded

PATH, WEIGHTS = "custom_reward_function.path", "custom_reward_function.weights"


def names(keys: dict[str, list[str]]) -> list[str]:
    """Return the names of the functions."""
    return [path.rpartition(":")[2] for path in keys[PATH]]


def test_one_function_a_list_and_a_mapping(tmp_path: Path) -> None:
    assert names(reward_keys(graded, folder=tmp_path)) == ["graded"]
    several = reward_keys([graded, (constant, 0.5)], folder=tmp_path)
    assert names(several) == ["graded", "constant"] and several[WEIGHTS] == [1.0, 0.5]
    named = reward_keys({"right": graded, "brief": lambda response: 1.0}, folder=tmp_path)
    assert names(named) == ["right", "brief"] and WEIGHTS not in named
    half: Any = np.float32(0.5)
    weighted = reward_keys((graded, half), folder=tmp_path)
    assert names(weighted) == ["graded"] and weighted[WEIGHTS] == [0.5]
    assert reward_keys("reward.py:correct", folder=tmp_path) == {PATH: ["reward.py:correct"]}


def test_two_functions_of_one_name_are_told_apart_by_a_dict(tmp_path: Path) -> None:
    lambdas: list[Any] = [lambda response: 1.0, (lambda response: 0.0, 0.5)]
    for rewards in (lambdas, [graded, graded]):
        with pytest.raises(UserError, match="two functions have the name") as caught:
            reward_keys(rewards, folder=tmp_path)
        assert 'Give a dict with a name for each: rewards={"right": ...' in caught.value.remedy
    reward_keys(["reward.py:f", "reward.py:g"], folder=tmp_path)


def test_another_process_loads_a_function_with_its_globals(tmp_path: Path) -> None:
    scale = 2.0
    keys = reward_keys({"double": lambda response: scale * len(response)}, folder=tmp_path)
    file = keys[PATH][0].rpartition(":")[0]
    code = f"import pickle; print(pickle.load(open({file!r}, 'rb'))(response='abc'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "6.0\n"


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"rewards\['held'\]: the function cannot be sent.*lock"):
        reward_keys({"held": lambda response: lock.locked()}, folder=tmp_path)
    with pytest.raises(UserError, match=r"rewards\['int'\]=3: is not a function"):
        reward_keys([3], folder=tmp_path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"rewards\['int'\]=3: is not a function"):
        reward_keys(3, folder=tmp_path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"rewards\['right'\]=.*is not a function"):
        reward_keys({"right": (graded, "0.5")}, folder=tmp_path)  # pyright: ignore
    with pytest.raises(UserError, match="rewards: there is no function"):
        reward_keys([], folder=tmp_path)
    with pytest.raises(UserError, match="'a b': is not a name"):
        reward_keys({"a b": graded}, folder=tmp_path)


def test_an_unchanged_function_keeps_its_file_and_a_changed_one_does_not(tmp_path: Path) -> None:
    def path_of(source: str, file: str) -> str:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, file, "exec"), names)
        return reward_keys(names["f"], folder=tmp_path)[PATH][0]

    first = path_of("def f(response): return 1.0\n", "/tmp/ipykernel_1/2.py")
    assert path_of("# first\n\ndef f(response): return 1.0\n", "/tmp/ipykernel_3/4.py") == first
    assert path_of("def f(response): return 2.0\n", "/tmp/ipykernel_1/2.py") != first


def test_an_edited_module_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "edited_reward.py"
    file.write_text("def f(response): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = import_module("edited_reward").f
    first = reward_keys(function, folder=tmp_path)
    assert reward_keys(function, folder=tmp_path) == first and not caplog.messages
    file.write_text("def f(response): return 2.0\n")
    assert reward_keys(function, folder=tmp_path) == first
    (message,) = caplog.messages
    assert message.startswith(f"{file} has changed since the last start in this folder")


def test_a_function_of_a_script_is_stored_whole_in_processes_of_multiprocessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, program.__name__, program)
    exec("def g(): return 2.0\ndef f(response): return g()\n", vars(program))
    file = reward_keys(vars(program)["f"], folder=tmp_path)[PATH][0].rpartition(":")[0]
    code = f"import pickle; print(pickle.load(open({file!r}, 'rb'))(response='abc'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2.0\n"


def test_a_function_with_a_cache_belongs_in_a_module(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    source = (
        "import functools\n@functools.cache\ndef g(x): return x\ndef f(response): return g(1.0)"
    )
    exec(source, names)
    with pytest.raises(UserError, match=r"rewards\['f'\]: it uses g, which .*lru_cache") as caught:
        reward_keys(names["f"], folder=tmp_path)
    assert "Define g in a module that the script imports" in caught.value.remedy
