# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``tandem train [RECIPE] key=value ...``, which is verl's ``main_ppo``.

Read and checked here, without torch, so that a mistake in them is said at once; ``training`` runs
what they say.
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
    """The configuration of a run. Raises UserError for mistakes in it."""
    configure_logging()
    loaded = load_arguments(RunConfig, arguments)
    check_run(loaded.config)
    check_platforms(loaded.config)
    check_built_run(loaded.config)
    print_notices(loaded, sys.stderr, warnings=tuple(run_warnings(loaded.config)))
    return loaded.config
