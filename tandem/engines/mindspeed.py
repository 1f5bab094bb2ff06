# SPDX-License-Identifier: Apache-2.0
"""MindSpeed, the package by which megatron-core computes on NPUs.

Its import redirects ``torch.cuda`` in the whole process, replaces functions of Megatron, and takes
the arguments of the process for settings. Only a worker whose device needs it imports it, without
arguments and before it imports Megatron.
"""

from __future__ import annotations

import sys
from importlib import import_module

_SETTINGS = {"use_flash_attn": True}
"""MindSpeed computes attention on NPUs by its own operator only. It wants no size of context
parallelism unless there is some."""


def adapt_megatron(package: str) -> None:
    """Import ``package`` and let it replace functions of Megatron, as our settings ask for."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        adaptor = import_module(f"{package}.megatron_adaptor")
    finally:
        sys.argv = arguments
    adaptor.repatch(dict(_SETTINGS))
