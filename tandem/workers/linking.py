# SPDX-License-Identifier: Apache-2.0
"""The place of a worker in the weight link of a run, and FlagCX if the link may use it."""

from __future__ import annotations

from functools import partial

import torch

from tandem.comm.flagcx import form_flagcx_group
from tandem.comm.flagcx_library import find_library, load_library
from tandem.errors import UserError
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import Platform
from tandem.weight_sync.handshake import FlagcxAccess, LinkPlace
from tandem.weight_sync.transport_choice import TransportKind
from tandem.workers.job import LinkSpec


def link_place(
    spec: LinkSpec,
    place: WorkerPlace,
    *,
    generation: int,
    platform: Platform,
    device: torch.device,
) -> LinkPlace:
    """Return this worker's place in the link of a generation: one more for each link that ended.

    Raises:
        UserError: FlagCX is requested but not installed, or installed but unusable.
    """
    return LinkPlace(
        name=f"weights/{generation}" if generation else "weights",
        rank=spec.first_rank + place.rank,
        size=spec.size,
        role=f"{place.pool} rank {place.rank}",
        device=device,
        platform=platform,
        device_id=f"{place.node_address}/{place.physical_id}" if place.physical_id else "",
        flagcx=_flagcx_access(spec, place, platform=platform),
    )


def _flagcx_access(
    spec: LinkSpec, place: WorkerPlace, *, platform: Platform
) -> FlagcxAccess | None:
    """Load FlagCX if the link crosses to another platform, or if it is requested."""
    is_wanted = spec.settings.transport is TransportKind.FLAGCX
    may_help = spec.crosses and spec.settings.transport is None
    if not platform.has_own_memory or not (is_wanted or may_help):
        return None
    environment = {"FLAGCX_PATH": place.flagcx_path} if place.flagcx_path else {}
    try:
        path = find_library(environment)
    except UserError:
        if is_wanted:
            raise
        return None
    library = load_library(path)
    handle = partial(stream_handle, platform.device_type)
    make_group = partial(form_flagcx_group, library=library, stream_handle=handle)
    return FlagcxAccess(library.vendor(), make_group)


def stream_handle(device_type: str, stream: object) -> int:
    """Return a stream's raw handle, which torch extensions name ``<device type>_stream``."""
    return getattr(stream, f"{device_type}_stream")
