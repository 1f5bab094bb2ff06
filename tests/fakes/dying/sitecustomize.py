# SPDX-License-Identifier: Apache-2.0
"""Makes a worker process kill or stop itself, or raise, as a method of ``Worker`` is called, or a
process with vLLM die at a certain point or hang in a step. Python runs this file at start where
its folder is in PYTHONPATH.

``TANDEM_TEST_DIE`` holds pool, rank, method, which call of it, and the name of the signal or
``RAISE``, with colons between them. ``TANDEM_TEST_STEPS`` holds a folder, the number of a step,
what happens to one process after the other, with commas, and the limit of a step in seconds.
What happens is ``kill`` or ``hang`` in that step, or death in the first step (``prefill``), at the
fifth tensor of an update (``take``), after the last one (``end``), or when there has been nothing
to generate for a moment (``idle``).
"""

import os
import signal
import sys
import threading
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

WORKER = "tandem.workers.worker"
VLLM = "tandem.rollout.vllm.engine"
IDLE_S = 0.02


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


class _Disturbances:
    """What happens to one process with vLLM after the other, noted as files of a folder."""

    def __init__(self, folder, names):
        self._folder = folder
        self._names = names

    def is_next(self, disturbance):
        """Return whether it is the first that has not happened, and note that it happens."""
        for index, name in enumerate(self._names):
            file = os.path.join(self._folder, f"{index}.{name}")
            if os.path.exists(file):
                continue
            if name == disturbance:
                open(file, "x").close()
            return name == disturbance
        return False

    def die_if(self, disturbance):
        if self.is_next(disturbance):
            os.kill(os.getpid(), signal.SIGKILL)


def _disturb_steps(module):
    folder, number, names, limit_s = os.environ["TANDEM_TEST_STEPS"].split(":")
    disturbances = _Disturbances(folder, names.split(","))
    watch = module.StepWatch
    # The first steps of a process compile nothing here.
    module.StepWatch = lambda engine: watch(engine, least_s=float(limit_s), slow_s=1.0)
    _disturb_engine(module.VllmRolloutEngine, disturbances, int(number))
    _disturb_sink(module.VllmSink, disturbances)


def _disturb_engine(engine, disturbances, number):
    step, advance = engine._step, engine.advance
    steps = []

    def spin():
        while True:
            pass

    def disturbed_step(self):
        steps.append(None)
        if len(steps) == 1:
            disturbances.die_if("prefill")
        if len(steps) == number:
            disturbances.die_if("kill")
            if disturbances.is_next("hang"):
                self._engine.step = spin
        step(self)

    def advance_and_rest(self, max_steps=None):
        completions = advance(self, max_steps)
        if steps and not self._samples:
            threading.Timer(IDLE_S, die_if_idle, (self,)).start()
        return completions

    def die_if_idle(self):
        if not self._samples and self._sink._opened is None:
            disturbances.die_if("idle")

    engine._step, engine.advance = disturbed_step, advance_and_rest


def _disturb_sink(sink, disturbances):
    take, end = sink.take, sink.end
    takes = []

    def disturbed_take(self, name, tensor):
        takes.append(None)
        if len(takes) == 5:
            disturbances.die_if("take")
        take(self, name, tensor)

    def disturbed_end(self):
        disturbances.die_if("end")
        end(self)

    sink.take, sink.end = disturbed_take, disturbed_end


for variable, module, change in (
    ("TANDEM_TEST_DIE", WORKER, _die),
    ("TANDEM_TEST_STEPS", VLLM, _disturb_steps),
):
    if variable in os.environ:
        sys.meta_path.insert(0, _Finder(module, change))
