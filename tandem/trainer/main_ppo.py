# SPDX-License-Identifier: Apache-2.0
"""``python -m tandem.trainer.main_ppo``: verl's name of ``tandem train``, with verl's defaults."""

from __future__ import annotations

import sys

from tandem.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["main_ppo", *sys.argv[1:]]))
