# SPDX-License-Identifier: Apache-2.0
"""Of MindSpeed: what replaces parts of Megatron."""

CALLS = []


def repatch(settings):
    CALLS.append(("repatch", dict(settings)))
