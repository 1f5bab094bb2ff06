# SPDX-License-Identifier: Apache-2.0
"""The README's picture where matplotlib (optional) is installed, and the remedy where it is not."""

import sys
from importlib.util import find_spec

import pytest

from tandem.errors import UserError
from tandem.metrics.jsonl import BEFORE_FIRST_STEP, JsonLinesFile
from tandem.metrics.plot import plot_png


def _run(folder, **metrics):
    file = JsonLinesFile(folder / "metrics.jsonl", keep_through_step=BEFORE_FIRST_STEP)
    for step in range(1, 30):
        file.append({"step": step, **metrics})
    file.close()
    return folder


def test_a_picture_or_the_remedy(tmp_path):
    folder = _run(tmp_path, **{"critic/score/mean": 0.5, "val-core/gsm8k/reward/mean@1": 0.25})
    output = tmp_path / "images" / "curve.png"

    if find_spec("matplotlib") is None:
        with pytest.raises(UserError, match="pip install matplotlib"):
            plot_png(folder, output)
    else:
        assert plot_png(folder, output) == output
        assert output.read_bytes().startswith(b"\x89PNG")
        assert output.stat().st_size > 5000


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)

    with pytest.raises(UserError, match="^--plot=.*pip install matplotlib"):
        plot_png(_run(tmp_path, **{"critic/score/mean": 0.5}), tmp_path / "curve.png")


def test_a_run_without_rewards(tmp_path):
    with pytest.raises(UserError, match="has no reward"):
        plot_png(_run(tmp_path, **{"train/loss": 0.5}), tmp_path / "curve.png")
