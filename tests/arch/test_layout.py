# SPDX-License-Identifier: Apache-2.0
"""docs/layout.md says what tests/arch/layout.py enforces; text files are ASCII and short enough."""

from __future__ import annotations

import re

from tests.arch.layout import ALLOWED, EVERYTHING, OWNERS, ROOMS
from tests.arch.source import ROOT, project_modules

ROW = re.compile(r"^\| `(\w+)` \| .+ \| (.+) \|$", re.MULTILINE)
TEXT_FILES = ("*.md", "*.toml", "*.txt", "*.yaml", "*.yml", "Makefile", "LICENSE", ".ci/run")
TEXT_FOLDERS = ("tandem", "docs", "examples", "benchmarks", "tests")
MAX_README_LINES = 200
MAX_ADR_LINES = 60


def documented_table() -> dict[str, frozenset[str]]:
    """The table of docs/layout.md in the form of ALLOWED."""
    table = {}
    for room, allowed in ROW.findall((ROOT / "docs/layout.md").read_text("utf-8")):
        names = frozenset(re.findall(r"\w+", allowed))
        if allowed.startswith("everything"):
            names = EVERYTHING - (names - {"everything", "but"}) - {room}
        table[room] = frozenset() if allowed == "nothing" else names
    return table


def test_documented_table_is_the_enforced_one() -> None:
    documented = documented_table()
    assert list(documented) == list(ROOMS)
    for room in ROOMS:
        assert documented[room] == ALLOWED[room], f"docs/layout.md and ALLOWED differ on {room!r}"


def test_table_has_no_cycle() -> None:
    composition_roots = {"workers", "driver", "facade", "quickstart", "cli", "trainer"}
    for position, room in enumerate(ROOMS):
        if room not in composition_roots:
            later = set(ROOMS[position:])
            assert not ALLOWED[room] & later, f"{room} imports a room that stands below it"


def test_owners_are_documented() -> None:
    text = (ROOT / "docs/layout.md").read_text("utf-8")
    for package in OWNERS:
        assert package in text, f"docs/layout.md does not say who owns {package}"


def test_every_folder_is_a_room() -> None:
    rooms = {module.room for module in project_modules() if module.folder == "tandem"}
    assert rooms - {"__init__"} <= set(ROOMS), f"not in docs/layout.md: {rooms - set(ROOMS)}"


def test_every_package_folder_has_an_init_file() -> None:
    paths = {module.path for module in project_modules() if module.folder == "tandem"}
    folders = {path.rsplit("/", 1)[0] for path in paths}
    missing = sorted(folder for folder in folders if f"{folder}/__init__.py" not in paths)
    assert not missing, f"no __init__.py in {missing}"


def test_text_files_are_ascii() -> None:
    files = [path for pattern in TEXT_FILES for path in ROOT.glob(pattern)]
    for folder in TEXT_FOLDERS:
        files += [path for pattern in TEXT_FILES for path in (ROOT / folder).rglob(pattern)]
    bad = [str(path.relative_to(ROOT)) for path in files if not path.read_bytes().isascii()]
    assert not bad, f"not ASCII: {bad}"


def test_readme_and_decision_records_are_short() -> None:
    readme = ROOT / "README.md"
    lines = readme.read_text("utf-8").count("\n") if readme.exists() else 0
    assert lines <= MAX_README_LINES, f"README.md has {lines} lines, at most {MAX_README_LINES}"
    for record in (ROOT / "docs/adr").glob("*.md"):
        lines = record.read_text("utf-8").count("\n")
        assert lines <= MAX_ADR_LINES, f"{record.name} is longer than a page"
