# SPDX-License-Identifier: Apache-2.0
"""Recording a sequence of device operations once and replaying it without their launch cost."""

from __future__ import annotations

from collections.abc import Callable

import torch

Replay = Callable[[], None]
Capturer = Callable[[Callable[[], None]], Replay]
"""Takes a function of no arguments that works on fixed tensors in place; it may be run at once.
What it returns runs it again."""


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
        return graph.replay

    return capture
