# SPDX-License-Identifier: Apache-2.0
"""The picture of two runs, or the remedy if matplotlib (optional) is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.report.compare import Pair, compare_runs
from tandem.report.compare_sources import read_metrics
from tandem.report.plot import plot_comparison, write_png
from tests.unit.report.compare_runs import REWARD, A, B, write_json


def test_a_picture_or_the_remedy(tmp_path: Path) -> None:
    broken = {**B, REWARD: [0.1, float("nan"), 0.3, 0.4, 0.5, 0.6]}
    a, b, again = (
        read_metrics(write_json(tmp_path / name, columns), key=name)
        for name, columns in (("a", A), ("b", broken), ("again", B))
    )
    pair = Pair(a, b, repeat_a=again)
    compared = compare_runs(pair, metric=REWARD, limit_percent=4)
    output = tmp_path / "images" / "compared.png"
    if find_spec("matplotlib") is None:
        with pytest.raises(UserError, match="pip install matplotlib"):
            plot_comparison(pair, compared, output=output)
        return
    assert plot_comparison(pair, compared, output=output).read_bytes().startswith(b"\x89PNG")
    unknown = tmp_path / "compared.unknown"
    with pytest.raises(UserError, match=f"^--plot='{unknown}': cannot be written .*png"):
        plot_comparison(pair, compared, output=unknown)
    with pytest.raises(UserError, match="cannot be written"):
        plot_comparison(pair, compared, output=tmp_path / "a" / "metrics.jsonl" / "x.png")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)

    with pytest.raises(UserError, match="^--plot=.*pip install matplotlib"):
        write_png(lambda panels: None, tmp_path / "curve.png")
