# SPDX-License-Identifier: Apache-2.0
"""Makes a worker process kill or stop itself, or raise, as a method of ``Worker`` is called, or a
step of vLLM kill its process or hang. Python runs this file at start where its folder is in
PYTHONPATH.

``TANDEM_TEST_DIE`` holds pool, rank, method, which call of it, and the name of the signal or
``RAISE``, with colons between them. ``TANDEM_TEST_STEPS`` holds a folder, the number of a step,
what happens in it to one process after the other (``kill`` or ``hang``, with commas), and the
limit of a step in seconds.
"""

import os
import signal
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

WORKER = "tandem.workers.worker"
VLLM = "tandem.rollout.vllm.engine"


class _Wrapping(Loader):
    """The usual loader, and then a class is changed."""

    def __init__(self, loader, change):
        self._loader = loader
        self._change = change

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._change(module)


class _Finder(MetaPathFinder):
    def __init__(self, name, change):
        self._name = name
        self._change = change

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        spec.loader = _Wrapping(spec.loader, self._change)
        return spec


def _die(module):
    pool, rank, method, number, name = os.environ["TANDEM_TEST_DIE"].split(":")
    original = getattr(module.Worker, method)
    calls = []

    def dying(self, *args, **kwargs):
        place = self._place
        if (place.pool, place.rank) == (pool, int(rank)):
            calls.append(None)
            if len(calls) == int(number):
                if name == "RAISE":
                    raise RuntimeError(f"as a test wants, at {time.time()}")
                os.kill(os.getpid(), signal.Signals[name])
        return original(self, *args, **kwargs)

    setattr(module.Worker, method, dying)


def _disturb_steps(module):
    folder, number, disturbances, limit_s = os.environ["TANDEM_TEST_STEPS"].split(":")
    watch, step = module.StepWatch, module.VllmRolloutEngine._step
    calls = []

    def hang_or_die(engine):
        for index, disturbance in enumerate(disturbances.split(",")):
            try:
                open(os.path.join(folder, f"{index}.{disturbance}"), "x").close()
            except FileExistsError:
                continue
            if disturbance == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            engine._engine.step = spin
            return

    def spin():
        while True:
            pass

    def counted(self):
        calls.append(None)
        if len(calls) == int(number):
            hang_or_die(self)
        step(self)

    # The first steps of a process compile nothing here.
    module.StepWatch = lambda engine: watch(engine, least_s=float(limit_s), slow_s=1.0)
    module.VllmRolloutEngine._step = counted


for variable, module, change in (
    ("TANDEM_TEST_DIE", WORKER, _die),
    ("TANDEM_TEST_STEPS", VLLM, _disturb_steps),
):
    if variable in os.environ:
        sys.meta_path.insert(0, _Finder(module, change))
