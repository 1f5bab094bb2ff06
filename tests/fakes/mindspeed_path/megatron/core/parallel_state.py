# SPDX-License-Identifier: Apache-2.0
"""Of Megatron: its groups."""

from mindspeed.megatron_adaptor import CALLS


def initialize_model_parallel(**sizes):
    CALLS.append(("groups", sizes))
