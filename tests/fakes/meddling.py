# SPDX-License-Identifier: Apache-2.0
"""A reward function that meddles with its process in the way that the response names."""

from __future__ import annotations

MEDDLING = """
import gc, json, os, resource, sys, time

async def never():
    return 1.0

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "coroutine":
        return {"score": 1.0, "more": never()}
    if solution_str == "generator":
        return {"score": (x for x in [1.0])}
    if solution_str == "descriptors":
        os.closerange(3, 256)
    if solution_str == "limits":
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    if solution_str == "collector":
        gc.disable(); gc.freeze()
    if solution_str == "json":
        json.dumps = json.loads = None
    if solution_str == "fork":
        os.fork()
    if solution_str == "daemon" and os.fork() == 0:
        os.setsid()
        time.sleep(10)
    if solution_str == "output":
        for _ in range(100):
            sys.stdout.write("x" * 1_000_000)
    return 1.0
"""
