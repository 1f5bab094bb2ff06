# SPDX-License-Identifier: Apache-2.0
"""A run of a sweep, as its command line describes it; it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.schema.run import RunConfig


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A run of a sweep.

    Attributes:
        name: its own values, such as ``lr_1e-5+seed_2``.
        config: its configuration, with a folder of its own.
    """

    name: str
    config: RunConfig
