# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``tandem train [RECIPE] key=value ...``, which is verl's ``main_ppo``.

They are read and checked here, without torch: an error is reported at once. ``driver.train`` runs
the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.config.schema.run import RunConfig
from tandem.driver.arguments import load_runnable
from tandem.driver.notices import configure_logging, print_notices


def parse(arguments: Sequence[str]) -> RunConfig:
    """Return the checked configuration of a run. Raise UserError if an argument is wrong."""
    configure_logging()
    loaded = load_runnable(RunConfig, arguments)
    print_notices(loaded, sys.stderr)
    return loaded.config
