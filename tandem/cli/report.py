# SPDX-License-Identifier: Apache-2.0
"""``tandem report RUN [--output FILE]``: write one HTML file about a run, finished or not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tandem.planner.advice import forecast_rows
from tandem.report.report import write_report
from tandem.report.run_folder import REPORT_FILE


def run(arguments: Sequence[str]) -> int:
    """Write the report and print its path. Raise UserError if the folder holds no run."""
    options = _parser().parse_args(arguments)
    output = options.output or options.run / REPORT_FILE
    print(write_report(options.run, output, forecast=forecast_rows(options.run)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem report",
        description="Write one self-contained HTML file with curves and sampled rollouts of a run.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="the file to write (default: RUN/report.html)"
    )
    return parser
