# SPDX-License-Identifier: Apache-2.0
"""The order of the ranks of a group across vendors. Pure.

Libraries that connect vendors find a vendor's ranks by subtracting the first: where those of one
vendor do not follow each other, they go wrong without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from tandem.errors import UserError


def vendor_order(vendors: Sequence[str]) -> list[int]:
    """The ranks in an order in which each vendor's follow each other: the vendor of the lowest rank
    first, its ranks ascending.

    Example:
        >>> vendor_order(["npu", "musa", "npu", "cpu"])
        [0, 2, 1, 3]
    """
    return sorted(range(len(vendors)), key=lambda rank: vendors.index(vendors[rank]))


def require_contiguous(vendors: Sequence[str]) -> None:
    """Raise UserError if the ranks of one vendor do not follow each other."""
    runs = [vendor for vendor, _ in groupby(vendors)]
    scattered = [vendor for vendor, number in Counter(runs).items() if number > 1]
    if scattered:
        ordered = [vendors[rank] for rank in vendor_order(vendors)]
        raise UserError(
            f"ranks={','.join(vendors)}: those of {scattered[0]} must follow each other. "
            f"Order them as {','.join(ordered)}."
        )
