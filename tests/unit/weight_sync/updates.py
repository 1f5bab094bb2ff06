# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced all the time while threads read them."""

from __future__ import annotations

import random
import threading
import time

import torch
from torch._C._distributed_c10d import Store

from tandem.weight_sync.handshake import LinkPlace, LinkSettings
from tandem.weight_sync.link import WeightLink, open_link
from tests.unit.weight_sync.layouts import cut, receiving, sending

NUM_READERS = 2


def update_often(
    store: Store, place: LinkPlace, *, settings: LinkSettings, num_updates: int
) -> list[set[int]]:
    """Rank 0 sends constant weights, the constant being the version, at random moments, and changes
    them as soon as it may; rank 1 puts what has arrived in use at random moments, while threads
    check that they read a single constant, and the right one.

    Returns:
        for each reader the versions that it met; of rank 0 nothing.
    """
    weights = {"a": torch.zeros(40, 10), "b": torch.zeros(7)}
    slices = cut(weights, (1, 1), rank=0)
    tensors = receiving(slices) if place.rank else sending(slices)
    link = open_link(store, place, tensors=tensors, settings=settings)
    link.gate.publish(0)
    readers = [_Reader(link, list(weights.values()), num_updates) for _ in range(NUM_READERS)]
    for reader in readers if place.rank else []:
        reader.start()
    source = random.Random(place.rank)
    for version in range(1, num_updates + 1):
        time.sleep(source.random() * 5e-4)
        if place.rank == 0:
            for tensor in weights.values():
                tensor.fill_(version)
        link.begin(version)
        if place.rank == 0:
            for tensor in weights.values():
                tensor.fill_(-version)
        else:
            _use_perhaps(link, version, chance=source.random())
    link.wait()
    if place.rank:
        assert link.swap() == num_updates
    for reader in readers if place.rank else []:
        reader.join()
        assert reader.mixed is None, f"version {reader.mixed} was mixed"
    link.close()
    return [reader.versions for reader in readers] if place.rank else []


def _use_perhaps(link: WeightLink, version: int, *, chance: float) -> None:
    """Put it in use, or whatever is there, or leave it to be skipped."""
    if chance < 0.3:
        assert link.swap(version) == version
    elif chance < 0.6:
        time.sleep(chance * 5e-3)
        link.swap()


class _Reader(threading.Thread):
    def __init__(self, link: WeightLink, weights: list[torch.Tensor], last: int) -> None:
        super().__init__(daemon=True)
        self.versions: set[int] = set()
        self.mixed: tuple[int, set[float]] | None = None
        self._link = link
        self._weights = weights
        self._last = last

    def run(self) -> None:
        source = random.Random()
        while self.mixed is None and self._last not in self.versions:
            with self._link.gate.reading(10) as version:
                seen = {float(value) for tensor in self._weights for value in tensor.unique()}
            if seen != {float(version)}:
                self.mixed = (version, seen)
            self.versions.add(version)
            time.sleep(source.random() * 5e-4)  # without pauses the writer hardly gets the GIL
