# SPDX-License-Identifier: Apache-2.0
"""``tandem train [RECIPE] key=value ...``: reinforcement learning as verl's ``main_ppo``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.cli.notices import configure_logging, print_notices
from tandem.cli.training import run_training
from tandem.config.overrides import load_config
from tandem.config.run import RunConfig
from tandem.config.validate import check_built_run, check_run


def run(arguments: Sequence[str]) -> int:
    """Train; the exit code is 0, or 128 plus the signal that stopped the run."""
    configure_logging()
    loaded = load_config(RunConfig, arguments)
    check_run(loaded.config)
    check_built_run(loaded.config)
    print_notices(loaded, sys.stderr)
    return run_training(loaded.config).exit_code
