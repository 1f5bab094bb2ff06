# SPDX-License-Identifier: Apache-2.0
"""Recording a sequence of device operations once and replaying it without their launch cost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

Replay = Callable[[], None]
Capturer = Callable[[Callable[[], None]], Replay]
"""Takes a function of no arguments that works on fixed tensors in place; it may be run at once.
What it returns runs it again."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with the function it was captured from: what that refers to must live as long."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def eager() -> Capturer:
    """For devices without graphs: what is captured is the function itself."""
    return lambda function: function


def cuda_graphs() -> Capturer:
    """CUDA graphs that share one memory pool, so only one of them may be in use at a time. Once all
    of them are gone, the pool is used up: another capturer makes another."""
    pool, stream = torch.cuda.graph_pool_handle(), _capture_stream()

    def capture(function: Callable[[], None]) -> Replay:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # compiles kernels and lets libraries allocate what must not be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, such as receiving weights, is not part of it.
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            function()
        return _Captured(graph, function)

    return capture


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all that a process captures: libraries and the allocator keep memory for each stream
    that they ever worked on."""
    return torch.cuda.Stream()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which would end a capture if it found an old graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
