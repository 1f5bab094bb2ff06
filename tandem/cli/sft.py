# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``tandem sft [RECIPE] key=value ...``, which is verl's ``fsdp_sft_trainer``.

They are read and checked here, without torch. ``driver.sft`` runs the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.config.schema.sft import SftConfig
from tandem.driver.arguments import load_runnable
from tandem.driver.notices import configure_logging, print_notices


def parse(arguments: Sequence[str]) -> SftConfig:
    """Return the checked configuration of a run. Raise UserError if an argument is wrong."""
    configure_logging()
    loaded = load_runnable(SftConfig, arguments)
    print_notices(loaded, sys.stderr)
    return loaded.config
