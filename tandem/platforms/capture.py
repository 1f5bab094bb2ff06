# SPDX-License-Identifier: Apache-2.0
"""Recording a sequence of device operations once and replaying it without their launch cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """CUDA graphs that share one memory pool, so only one of them may be in use at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[[], None]) -> Replay:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # compiles kernels and lets libraries allocate what must not be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            function()
        return _Captured(graph, function)

    return capture
