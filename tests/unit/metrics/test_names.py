# SPDX-License-Identifier: Apache-2.0
"""The table of metrics: its rows match the names they stand for, and docs/metrics.md shows it.

``python -m tests.unit.metrics.test_names`` writes the table into the page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.metrics.names import METRICS, find_metric

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
START, END = "<!-- table -->\n", "<!-- end of table -->"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("critic/score/mean", "critic/score/<mean|max|min>"),
        ("rollout_corr/kl", "rollout_corr/kl[/lag_<k>]"),
        ("rollout_corr/kl/lag_3", "rollout_corr/kl[/lag_<k>]"),
        ("timing_s/step", "timing_s/step"),
        ("timing_s/gen", "timing_s/<section>"),
        (
            "val-core/openai/gsm8k/acc/best@4/mean",
            "<val-core|val-aux>/<source>/<variable>/<best|worst|maj>@<n>/<mean|std>",
        ),
    ],
)
def test_a_logged_name_belongs_to_a_row(name: str, row: str) -> None:
    found = find_metric(name)
    assert found is not None and found.name == row


@pytest.mark.parametrize("name", ["critic/score", "critic/score/median", "my/number", "actor.lr"])
def test_other_names_belong_to_none(name: str) -> None:
    assert find_metric(name) is None


def test_rows_are_unique_and_complete() -> None:
    assert len({row.name for row in METRICS}) == len(METRICS)
    for row in METRICS:
        assert row.meaning and not row.meaning.endswith("."), row.name


def test_the_page_has_the_table() -> None:
    documented = PAGE.read_text("utf-8").partition(START)[2].partition(END)[0]
    assert documented == _table(), f"run python -m {__name__}"


def _table() -> str:
    lines = ["| metric | unit | meaning |", "|---|---|---|"]
    for row in METRICS:
        name = row.name.replace("|", "\\|")
        lines.append(f"| `{name}` | {row.unit or '-'} | {row.meaning} |")
    return "\n".join(lines) + "\n"


def _write_page() -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    PAGE.write_text(f"{before}{START}{_table()}{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    _write_page()
