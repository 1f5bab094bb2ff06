# SPDX-License-Identifier: Apache-2.0
"""``python -m tandem.trainer.fully_async_main``: verl's ``fully_async_policy.fully_async_main``."""

from __future__ import annotations

import sys

from tandem.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["fully_async_main", *sys.argv[1:]]))
