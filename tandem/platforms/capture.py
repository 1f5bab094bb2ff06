# SPDX-License-Identifier: Apache-2.0
"""Recording of device operations, and their replay without launch costs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

Replay = Callable[[], None]
Capturer = Callable[[Callable[[], None]], Replay]
"""A function that takes a function of no arguments and returns one that runs it again.

The given function works on fixed tensors in place. The capturer may run it at once."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and the captured function, which keeps its tensors alive."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def eager() -> Capturer:
    """Return a capturer for devices without graphs, which returns the function itself."""
    return lambda function: function


def cuda_graphs() -> Capturer:
    """Return a capturer of CUDA graphs, which share a memory pool: only one may run at a time.

    Once all graphs are gone, the pool cannot be used again: make another capturer.
    """
    pool, stream = torch.cuda.graph_pool_handle(), _capture_stream()

    def capture(function: Callable[[], None]) -> Replay:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # compiles kernels and lets libraries allocate what must not be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Work of other threads, such as receiving weights, must not become part of the graph.
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            function()
        return _Captured(graph, function)

    return capture


@cache
def _capture_stream() -> torch.cuda.Stream:
    # One stream for all graphs of a process: libraries and the allocator keep memory for each
    # stream that they ever used.
    return torch.cuda.Stream()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector, which would end a capture if it freed an old graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
