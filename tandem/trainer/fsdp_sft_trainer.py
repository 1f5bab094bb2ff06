# SPDX-License-Identifier: Apache-2.0
"""``python -m tandem.trainer.fsdp_sft_trainer``: verl's older name of ``tandem sft``."""

from __future__ import annotations

import sys

from tandem.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["fsdp_sft_trainer", *sys.argv[1:]]))
