# SPDX-License-Identifier: Apache-2.0
"""Weights from GPUs to rollouts on doubles of another vendor and on the host, by staging."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.test_mixed_sync import MIB, Ends, check, transfer

pytestmark = pytest.mark.usefixtures("doubles")


def test_weights_of_gpus_reach_another_vendor_and_the_host_bit_by_bit() -> None:
    vendor = "cuda" if torch.cuda.is_available() else "npu"
    num_trainers = min(2, torch.cuda.device_count()) or 1
    platforms = (*[vendor] * num_trainers, "musa", "musa", "cpu")
    ends = Ends(platforms, buckets=(MIB, 100_003))
    told = run_ranks(transfer, len(platforms), ends, joined=False, timeout_s=200)
    check(told, len(ends.buckets))
    groups = {names for one in told for names, _ in one["broadcasts"]}
    assert groups == {(vendor, "musa"), (vendor, "cpu"), ("musa", "musa")}
