# SPDX-License-Identifier: Apache-2.0
"""The index of docs/extend counts the files that know a built-in thing of each kind."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tandem.config.schema.rollout import ENGINES

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (?P<kind>[^|]+) \|[^|]+\|[^|]+\| 1 \| (?P<inside>\d) \|$", re.MULTILINE)
KNOWN_BY = {
    "an advantage estimator": r'"rloo"',
    "a policy loss": r'"cispo"',
    "a reward": r'"math_dapo"',
    "a data set": r"_read_lines\(",
    "a metric": r'"response/aborted_ratio"',
    "a metric sink": r"\bWandbSink\b",
    "a platform": r'"mlu"|\bMLU_PLATFORM\b',
}
"""An expression that occurs in every file that knows one built-in thing of the kind."""


def documented() -> dict[str, int]:
    """Return the number of files by kind."""
    text = (ROOT / "docs/extend/index.md").read_text("utf-8")
    return {match["kind"]: int(match["inside"]) for match in ROW.finditer(text)}


@pytest.mark.parametrize("kind", KNOWN_BY)
def test_as_many_files_know_it_as_the_index_says(kind: str) -> None:
    expression = re.compile(KNOWN_BY[kind])
    files = (ROOT / "tandem").rglob("*.py")
    knowing = sorted(str(file) for file in files if expression.search(file.read_text("utf-8")))
    assert len(knowing) == documented()[kind], knowing


def test_a_rollout_engine_is_named_in_one_table_and_built_in_its_own_file() -> None:
    texts = {file: file.read_text("utf-8") for file in (ROOT / "tandem").rglob("*.py")}
    (table,) = (file for file, text in texts.items() if '"trtllm"' in text)
    assert table == ROOT / "tandem/config/schema/rollout.py"
    assert documented()["a rollout engine"] == len({table, "its own file"})
    assert all(callable(resolve_name(path)) for path in ENGINES.values())


def test_every_page_is_in_the_index() -> None:
    text = (ROOT / "docs/extend/index.md").read_text("utf-8")
    for page in (ROOT / "docs/extend").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in text, page
