# SPDX-License-Identifier: Apache-2.0
"""``python -m tandem.trainer.one_step_off_main``: verl's ``one_step_off_policy.main_ppo``."""

from __future__ import annotations

import sys

from tandem.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["one_step_off_main", *sys.argv[1:]]))
