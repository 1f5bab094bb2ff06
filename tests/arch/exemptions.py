# SPDX-License-Identifier: Apache-2.0
"""Reads exemptions.toml: where a rule would make a piece of code worse, and why."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from tests.arch.source import ROOT

FILE = ROOT / "tests/arch/exemptions.toml"
MAX_EXEMPTIONS = 15


@dataclass(frozen=True)
class Exemption:
    """``place`` is a path, or ``path::qualified name``, as the failing rule prints it."""

    rule: str
    place: str
    reason: str


def read_exemptions() -> tuple[Exemption, ...]:
    """All exemptions of the project."""
    entries = tomllib.loads(FILE.read_text("utf-8")).get("exemption", [])
    return tuple(Exemption(**entry) for entry in entries)
