# SPDX-License-Identifier: Apache-2.0
"""``python -m tandem.trainer.sft_trainer``: verl's name of ``tandem sft``, with verl's defaults."""

from __future__ import annotations

import sys

from tandem.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sft_trainer", *sys.argv[1:]]))
