# SPDX-License-Identifier: Apache-2.0
"""The remedy where matplotlib (optional) is not installed."""

import sys

import pytest

from tandem.errors import UserError
from tandem.report.plot import write_png


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)

    with pytest.raises(UserError, match="^--plot=.*pip install matplotlib"):
        write_png(lambda panels: None, tmp_path / "curve.png")
