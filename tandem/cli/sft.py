# SPDX-License-Identifier: Apache-2.0
"""``tandem sft [RECIPE] key=value ...``: supervised fine-tuning as verl's ``fsdp_sft_trainer`` does
it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.cli.notices import configure_logging, print_notices
from tandem.cli.supervised import run_supervised
from tandem.config.overrides import load_config
from tandem.config.sft import SftConfig
from tandem.config.validate import check_built_sft, check_sft


def run(arguments: Sequence[str]) -> int:
    """Fine-tune; the exit code is 0, or 128 plus the signal that stopped the run."""
    configure_logging()
    loaded = load_config(SftConfig, arguments)
    check_sft(loaded.config)
    check_built_sft(loaded.config)
    print_notices(loaded, sys.stderr)
    return run_supervised(loaded.config).exit_code
