# SPDX-License-Identifier: Apache-2.0
"""An optimizer step whose weights and moments visit the device in parts.

What rests in host memory is copied to the device for the step of its part and back, so that the
device holds few of the weights at a time instead of all. The next part arrives and the last one
leaves while a part is stepped. Results are those of a step at once, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.config.derived.sizes import OPTIMIZER_PART_NUMBERS
from tandem.engines.adamw import AdamW, Moments
from tandem.engines.offload import HostMemory, OffloadedParameters, wait_for
from tandem.engines.optim import PolicyOptimizer


@dataclass(frozen=True, slots=True)
class _Visit:
    """A part on the device.

    Attributes:
        chosen: its place in the order of all weights.
        weights: None if the weights rest on the device.
        arrived: None on a CPU.
    """

    chosen: slice
    weights: Sequence[Tensor] | None
    moments: Moments
    arrived: torch.Event | None


class _Lanes:
    """The streams by which parts come and go; a CPU has none, and its copies are immediate."""

    def __init__(self, device: torch.device) -> None:
        has_streams = device.type != "cpu"
        self._device = device
        self._coming, self._going = (
            torch.Stream(device) if has_streams else None for _ in range(2)
        )

    def coming(self) -> AbstractContextManager[object]:
        """Queue copies after all work that was queued so far."""
        return self._on(self._coming)

    def going(self) -> AbstractContextManager[object]:
        """Queue copies after all work that was queued so far."""
        return self._on(self._going)

    def arrival(self) -> torch.Event | None:
        """Return an event after the copies that come."""
        return None if self._coming is None else self._coming.record_event()

    def await_arrival(self, visit: _Visit) -> None:
        """Let the device wait for a part."""
        if visit.arrived is not None:
            torch.accelerator.current_stream(self._device).wait_event(visit.arrived)

    def departure(self) -> torch.Event | None:
        """Return an event after the copies that go."""
        return None if self._going is None else self._going.record_event()

    def hold(self, tensor: Tensor) -> None:
        """Keep the memory of a freed tensor until it has left."""
        if self._going is not None:
            tensor.record_stream(self._going)

    def _on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        return stream


class StreamedStep:
    """The steps of one optimizer over weights that may rest in host memory."""

    def __init__(
        self,
        optimizer: AdamW,
        *,
        device: torch.device,
        offloaded: OffloadedParameters | None,
        hosts_moments: bool,
    ) -> None:
        """Prepare steps. The first one allocates the moments, unless ``allocate`` has begun it.

        Args:
            offloaded: the weights, if they rest in host memory.
            hosts_moments: whether the moments rest there.
        """
        self._optimizer = optimizer
        self._device = device
        self._offloaded = offloaded
        self._hosts_moments = hosts_moments
        self._hosted: Moments = {}
        self._memory: HostMemory | None = None
        self._lanes = _Lanes(device)
        # A checkpoint is read to where the moments rest, too.
        optimizer.new_moments = self._new_moments

    def allocate(self, weights: Mapping[str, Tensor]) -> None:
        """Begin to allocate the host's memory for the moments, while other work goes on."""
        if self._hosts_moments:
            self._memory = self._memory_for(weights)

    def parts(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, rate: float
    ) -> Iterator[Mapping[str, Tensor]]:
        """Step part by part, and yield the weights of each while they are on the device.

        The step of a part has been queued when it is yielded. In the end, the host has all values.

        Args:
            weights: all weights, in the order of ``offloaded`` and of the moments.
        """
        self._prepare_moments(weights)
        names, optimizer = list(weights), self._optimizer
        slices = list(parts_of(weights, limit=OPTIMIZER_PART_NUMBERS))
        coming = self._fetch(slices[0]) if slices else None
        departed: torch.Event | None = None
        for following in [*slices[1:], None]:
            visit = coming
            if visit is None:
                break
            coming = None if following is None else self._fetch(following)
            self._lanes.await_arrival(visit)
            if self._offloaded is not None and visit.weights is not None:
                self._offloaded.place(visit.chosen, visit.weights)
            stepped = {name: weights[name] for name in names[visit.chosen]}
            first = visit.chosen.start
            optimizer.step_with(
                visit.moments, stepped, gradients=gradients, rate=rate, first_index=first
            )
            yield stepped
            self._send_back(visit)
            # The host would queue all parts at once, each in memory of its own.
            if departed is not None:
                departed.synchronize()
            departed = self._lanes.departure()
        wait_for(self._device)

    @torch.no_grad()
    def _fetch(self, chosen: slice) -> _Visit:
        """Queue the copies of a part to the device."""
        hosted = None if self._offloaded is None else self._offloaded.hosted(chosen)
        resting = {name: parts[chosen] for name, parts in self._optimizer.moments.items()}
        weights = None if hosted is None else [self._room(part) for part in hosted]
        moments = {name: [self._room(part) for part in parts] for name, parts in resting.items()}
        pairs = [*zip(hosted or (), weights or (), strict=True)]
        for name, parts in resting.items():
            pairs += zip(parts, moments[name], strict=True)
        with self._lanes.coming():
            for source, target in pairs:
                if target is not source:
                    target.copy_(source, non_blocking=True)
        return _Visit(chosen, weights, moments, self._lanes.arrival())

    def _room(self, part: Tensor) -> Tensor:
        """Return memory on the device for a part, or the part itself if it is there."""
        # On a CPU, where both are the same device, offloaded weights move all the same.
        is_there = part.device == self._device and self._device.type != "cpu"
        return part if is_there else torch.empty_like(part, device=self._device)

    @torch.no_grad()
    def _send_back(self, visit: _Visit) -> None:
        """Queue the copies of a part to the host, and free it on the device once they are done."""
        chosen, offloaded = visit.chosen, self._offloaded
        pairs: list[tuple[Tensor, Tensor]] = []
        if offloaded is not None and visit.weights is not None:
            hosted = offloaded.hosted(chosen)
            pairs += zip(hosted, visit.weights, strict=True)
        for name, parts in self._optimizer.moments.items():
            pairs += zip(parts[chosen], visit.moments[name], strict=True)
        with self._lanes.going():
            for target, source in pairs:
                if target is not source:
                    target.copy_(source, non_blocking=True)
                    self._lanes.hold(source)
        if offloaded is not None:
            offloaded.place(chosen, offloaded.hosted(chosen))

    def _new_moments(self, weights: Mapping[str, Tensor]) -> Moments:
        """Return the moments before the first step where they rest."""
        if not self._hosts_moments:
            return _moments_on(self._device, self._optimizer, weights=weights)
        memory, self._memory = self._memory or self._memory_for(weights), None
        dtype = self._optimizer.moments_dtype
        first, second = (
            [memory.zeros_like(weight, dtype) for weight in weights.values()] for _ in range(2)
        )
        steps = [torch.zeros((), device=self._device) for _ in weights]
        self._hosted = {"exp_avg": first, "exp_avg_sq": second, "step": steps}
        return self._hosted

    def _memory_for(self, weights: Mapping[str, Tensor]) -> HostMemory:
        dtype = self._optimizer.moments_dtype
        sizes = [dtype.itemsize * weight.numel() for weight in weights.values()]
        return HostMemory([*sizes, *sizes], device=self._device)

    def _prepare_moments(self, weights: Mapping[str, Tensor]) -> None:
        """Create moments; move those to the host that were read from a file of one device."""
        optimizer = self._optimizer
        given = optimizer.moments
        if not given:
            optimizer.moments = self._new_moments(weights)
        elif self._hosts_moments and given is not self._hosted:
            optimizer.moments = self._new_moments(weights)
            for name, parts in optimizer.moments.items():
                for part, source in zip(parts, given[name], strict=True):
                    part.copy_(source)


def stream_steps(
    optimizer: PolicyOptimizer,
    *,
    device: torch.device,
    offloaded: OffloadedParameters | None = None,
    hosts_moments: bool,
) -> StreamedStep | None:
    """Return the steps by parts of an optimizer; None for Muon, whose steps need whole matrices."""
    adam = optimizer.alone
    if adam is None:
        return None
    return StreamedStep(adam, device=device, offloaded=offloaded, hosts_moments=hosts_moments)


def _moments_on(
    device: torch.device, optimizer: AdamW, *, weights: Mapping[str, Tensor]
) -> Moments:
    """Return the moments before the first step on ``device``, wherever the weights are."""
    dtype = optimizer.moments_dtype

    def zeros() -> list[Tensor]:
        return [torch.zeros_like(x, dtype=dtype, device=device) for x in weights.values()]

    steps = [torch.zeros((), device=device) for _ in weights]
    return {"exp_avg": zeros(), "exp_avg_sq": zeros(), "step": steps}


def parts_of(weights: Mapping[str, Tensor], *, limit: int) -> Iterator[slice]:
    """Yield the parts of all weights, as slices of their order.

    Args:
        limit: the most numbers of a part; a larger weight is a part of its own.
    """
    start = stop = numbers = 0
    for weight in weights.values():
        if stop > start and numbers + weight.numel() > limit:
            yield slice(start, stop)
            start, numbers = stop, 0
        numbers += weight.numel()
        stop += 1
    if stop > start:
        yield slice(start, stop)
