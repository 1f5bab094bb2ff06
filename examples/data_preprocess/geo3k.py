# SPDX-License-Identifier: Apache-2.0
"""``tandem prepare geo3k`` at the path of verl's script, with verl's options."""

from __future__ import annotations

import sys

from tandem.cli.main import main as tandem


def main() -> int:
    """Run the command with the arguments of this script; return the exit code."""
    return tandem(["prepare", "geo3k", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
