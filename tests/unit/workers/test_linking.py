# SPDX-License-Identifier: Apache-2.0
"""A worker's place in the weight link, and FlagCX there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.comm.flagcx_library import LIBRARY, Abi
from tandem.errors import UserError
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import CUDA
from tandem.weight_sync.handshake import LinkPlace, LinkSettings
from tandem.weight_sync.transport_choice import TransportKind
from tandem.workers.job import LinkSpec
from tandem.workers.linking import link_place

SETTINGS = LinkSettings(send_bucket_bytes=1, receive_bucket_bytes=1, timeout_s=1)
CROSSING = LinkSpec(first_rank=2, size=4, crosses=True, settings=SETTINGS)
ASKED_FOR = replace(CROSSING, settings=replace(SETTINGS, transport=TransportKind.FLAGCX))


def _place(spec: LinkSpec, flagcx_path: Path) -> LinkPlace:
    place = WorkerPlace("generate", 1, 2, 0, "127.0.0.1", flagcx_path=str(flagcx_path))
    device = torch.device("cpu")
    return link_place(spec, place, generation=0, platform=CUDA, device=device)


@pytest.mark.parametrize("spec", [CROSSING, ASKED_FOR])
def test_flagcx_is_taken_along_where_it_is(
    spec: LinkSpec, flagcx_stub: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGCX_STUB_VENDOR", "NVIDIA")
    folder = flagcx_stub(Abi.DEVICE_HANDLE).parents[1]
    place = _place(spec, folder)
    assert place.rank == 3
    assert place.flagcx is not None
    assert place.flagcx.vendor == "NVIDIA"
    assert _place(replace(CROSSING, crosses=False), folder).flagcx is None, "no use for it"


def test_a_missing_flagcx_matters_only_where_it_is_asked_for(tmp_path: Path) -> None:
    assert _place(CROSSING, tmp_path).flagcx is None
    with pytest.raises(UserError, match="FlagCX is not installed there"):
        _place(ASKED_FOR, tmp_path)


@pytest.mark.parametrize("spec", [CROSSING, ASKED_FOR])
def test_a_broken_flagcx_is_never_passed_over(spec: LinkSpec, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / LIBRARY).write_text("no library")
    with pytest.raises(UserError, match="cannot be loaded"):
        _place(spec, tmp_path)
