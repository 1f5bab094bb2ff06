# SPDX-License-Identifier: Apache-2.0
"""``python -m tandem``: another name of ``tandem``."""

from __future__ import annotations

import sys

from tandem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
