# SPDX-License-Identifier: Apache-2.0
"""What is compared before and after a transfer: what a process lists with what it once said, and
what all have told each other, which gives the same error in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.types import HeldSlice, SliceSpec
from tandem.weight_sync.failure import FirstFailure, SyncError
from tandem.weight_sync.handshake import FormedLink, LinkTensors, list_slices
from tandem.weight_sync.plan import Layout
from tandem.weight_sync.transfer import find_mismatch


def agree_to_start(formed: FormedLink, answers: Sequence[tuple[int, str]]) -> None:
    """Nobody has failed, and all mean the same version. Raises SyncError."""
    versions = {version for version, _ in answers}
    for (version, cause), role in zip(answers, formed.roles, strict=True):
        if cause:
            raise SyncError(f"version {version}: {role}: {cause}")
    if len(versions) > 1:
        told = ", ".join(f"{r}: {v}" for r, (v, _) in zip(formed.roles, answers, strict=True))
        raise SyncError(f"the processes do not transfer the same version ({told})")


def agree_on_end(formed: FormedLink, answers: Sequence[tuple[str, dict[int, int]]]) -> None:
    """Nobody has failed, and what arrived is what was sent. Raises SyncError."""
    for (cause, _), role in zip(answers, formed.roles, strict=True):
        if cause:
            raise SyncError(f"{role}: {cause}")
    mismatch = find_mismatch(formed, [checksums for _, checksums in answers])
    if mismatch:
        raise SyncError(mismatch)


def list_planned(
    tensors: LinkTensors, layout: Layout, *, failure: FirstFailure
) -> tuple[list[HeldSlice], list[HeldSlice]]:
    """What a process sends and what it receives into, which is what the link was formed with; none
    of it after a failure."""
    with failure.noted("listing weights"):
        sends = list_slices(tensors.sends)
        live = list_slices(tensors.receives)
        _check_unchanged(sends, layout.sends)
        _check_unchanged(live, layout.needs)
        return sends, live
    return [], []


def _check_unchanged(slices: Sequence[HeldSlice], planned: Sequence[SliceSpec]) -> None:
    listed = [held.spec for held in slices]
    if listed != list(planned):
        changed = set(listed) ^ set(planned)
        name = min((spec.name for spec in changed), default="their order")
        raise SyncError(f"{name}: its slices are not those that the link was formed with")
