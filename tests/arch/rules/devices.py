# SPDX-License-Identifier: Apache-2.0
"""Rule 39: vendor names of devices and backends appear in platforms/ and comm/ only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tests.arch.source import Module, Violation, dotted, in_folders, prose

VENDOR_WORD = re.compile(r"(?<![A-Za-z_])(cuda|nccl|hccl|mccl|npu|musa)(?![A-Za-z_])")
VENDOR_ATTRIBUTE = re.compile(r"^torch\.(cuda|npu|musa|xpu|mps)$")
VENDOR_ROOMS = frozenset({"platforms", "comm"})


def vendor_names(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 39: branch on a capability of the platform, never on a vendor's name."""
    for module in in_folders(modules, "tandem"):
        if module.room in VENDOR_ROOMS:
            continue
        notes = prose(module.tree)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and id(node) not in notes:
                found = VENDOR_WORD.search(node.value) if isinstance(node.value, str) else None
                if found:
                    yield Violation(
                        module.path, f"line {node.lineno}: the string {found.group()!r}"
                    )
            elif isinstance(node, ast.Attribute) and VENDOR_ATTRIBUTE.match(dotted(node)):
                yield Violation(module.path, f"line {node.lineno}: {dotted(node)}")
