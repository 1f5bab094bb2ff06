# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``tandem train [RECIPE] key=value ...``, which is verl's ``main_ppo``.

They are read and checked here, without torch: an error is reported at once. ``driver.train`` runs
the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.config.check.rules import check_built_run, check_run
from tandem.config.plan.plan import run_warnings
from tandem.config.schema.run import RunConfig
from tandem.driver.arguments import check_platforms, load_arguments
from tandem.driver.notices import configure_logging, print_notices


def parse(arguments: Sequence[str]) -> RunConfig:
    """Return the checked configuration of a run. Raise UserError if an argument is wrong."""
    configure_logging()
    loaded = load_arguments(RunConfig, arguments)
    check_run(loaded.config)
    check_platforms(loaded.config)
    check_built_run(loaded.config)
    print_notices(loaded, sys.stderr, warnings=tuple(run_warnings(loaded.config)))
    return loaded.config
