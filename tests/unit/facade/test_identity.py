# SPDX-License-Identifier: Apache-2.0
"""The digest of a function, which an unchanged script has in every start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.facade.identity import CachedInScript, identity_of

ROOT = Path(__file__).parents[3]
SCRIPT = """
import dataclasses, enum, os.path, typing
from tandem.facade.identity import identity_of

UNITS = {"kg", "m", "s", "apples", "pears", ("a", 1), frozenset({"x", "y", "z"})}

@dataclasses.dataclass
class Rule:
    limit: int = 3

    def holds(self, text):
        return text in {"one", "two", "three", "four"} or len(text) < self.limit

@dataclasses.dataclass
class Cleaner:
    clean: typing.Callable = lambda text: text.strip()
    marks: frozenset = frozenset({"!", "?", "."})

T = typing.TypeVar("T")

class Box(typing.Generic[T]):
    def put(self, value: T) -> T:
        return value

CHECKS = set()

def check(function):
    CHECKS.add(function)
    return function

class Kind(enum.Enum):
    LONG = 1

def deep(text, depth=2):
    return deep(text, depth - 1) if depth else text  # recursive

@check
def reward(response, extra=frozenset(UNITS)):
    if len(CHECKS) > 1:
        response = Box().put(Cleaner().clean(response))
    known = Kind.LONG.value * (response in UNITS)
    return known + Rule().holds(deep(os.path.basename(response)))
print(*identity_of(reward))
"""


def digest_in_a_process(source: str, file: Path, *, seed: int) -> str:
    """Return what a script prints that is started with a seed of the hashes of texts."""
    file.write_text(source)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def test_an_unchanged_script_has_the_same_digest_in_every_process_and_file(tmp_path: Path) -> None:
    first = digest_in_a_process(SCRIPT, tmp_path / "one.py", seed=1)
    moved = SCRIPT.replace("def reward", "# a comment\n\ndef reward").replace("# recursive", "")
    assert digest_in_a_process(moved, tmp_path / "two.py", seed=2) == first
    assert first.endswith("True\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"pears"', '"plums"'),
        ("< self.limit", "> self.limit"),
        ("limit: int = 3", "limit: int = 4"),
        ("depth=2", "depth=3"),
        ("depth - 1)", "depth - 2)"),
        ("LONG = 1", "LONG = 2"),
        ('"four"', '"five"'),
        ("os.path.basename", "os.path.dirname"),
        ("text.strip()", "text.lower()"),
        ("return function", "return print"),
    ],
)
def test_a_function_with_other_code_or_globals_has_another_digest(
    old: str, new: str, tmp_path: Path
) -> None:
    assert old in SCRIPT
    file = tmp_path / "script.py"
    first = digest_in_a_process(SCRIPT, file, seed=1)
    assert digest_in_a_process(SCRIPT.replace(old, new), file, seed=1) != first


def test_cells_of_a_notebook_may_have_other_names() -> None:
    def defined_in(file: str) -> str:
        names = {"__name__": "__main__", "__file__": file}
        exec(compile("def f(response):\n    return 1.0\n", file, "exec"), names)
        return identity_of(names["f"])[0]

    assert defined_in("/tmp/ipykernel_1/2.py") == defined_in("/tmp/ipykernel_3/4.py")


def test_a_function_of_a_module_is_known_by_its_name() -> None:
    assert identity_of(subprocess.run)[1] is False
    assert identity_of(subprocess.run) != identity_of(subprocess.call)


def test_a_cached_function_of_the_script_is_refused() -> None:
    names = {"__name__": "__main__"}
    source = "import functools\n@functools.cache\ndef f(x): return x\ndef g(y): return f(y)\n"
    exec(source, names)
    with pytest.raises(CachedInScript, match="f"):
        identity_of(names["g"])
