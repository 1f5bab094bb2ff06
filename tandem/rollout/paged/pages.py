# SPDX-License-Identifier: Apache-2.0
"""The free pages, and the number of owners of each page. Integers only; no device."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Pages 0..``num_pages`` - 1 with reference counts."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """The number of pages without an owner."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take ``count`` free pages, with one owner each. At least ``count`` must be free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Sequence[int], *, owners: int) -> None:
        """Add ``owners`` owners to each page."""
        for page in pages:
            self._owners[page] += owners

    def release(self, pages: Sequence[int]) -> None:
        """Remove one owner from each page. Pages without owners become free."""
        for page in pages:
            self._owners[page] -= 1
            assert self._owners[page] >= 0, f"page {page} was released more often than taken"
            if self._owners[page] == 0:
                self._free.append(page)
