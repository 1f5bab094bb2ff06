# SPDX-License-Identifier: Apache-2.0
"""A13 on GPUs: of a slice of a node each worker uses the one GPU that Ray handed it."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tandem.platforms.record import CUDA as PLATFORM
from tests.distributed.test_isolation import CUDA, run

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def _uuids() -> list[str]:
    """Of all GPUs of the node, by their index."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()
    return [line.removeprefix("GPU-") for line in lines]


@pytest.mark.parametrize("switch", [{}, {NOSET: "1"}], ids=["ray", "noset"])
@pytest.mark.parametrize("share", ["all", "last half"])
def test_a13_workers_of_a_slice_use_their_gpu_alone(share: str, switch: dict[str, str]) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        pytest.skip("needs two GPUs")
    uuids = _uuids()
    slice_ = [str(i) for i in range(num_gpus)][num_gpus // 2 if share == "last half" else 0 :]
    told = run(PLATFORM, {}, size=len(slice_), **{CUDA: ",".join(slice_)}, **switch)
    ids = [one["planned"][1] for one in told]
    assert sorted(ids) == slice_
    for one, physical in zip(told, ids, strict=True):
        assert one["planned"][0] == 0
        assert one["used"] == (0, uuids[int(physical)])
        assert (one["seen"], one["environment"][CUDA]) == (1, physical)
