# SPDX-License-Identifier: Apache-2.0
"""Makes a worker process kill or stop itself, or raise, as a method of ``Worker`` is called: Python
runs this file at start where its folder is in PYTHONPATH.

``TANDEM_TEST_DIE`` holds pool, rank, method, which call of it, and the name of the signal or
``RAISE``, with colons between them.
"""

import os
import signal
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

MODULE = "tandem.workers.worker"


class _Wrapping(Loader):
    """The usual loader, and then the class is changed."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        _wrap(module.Worker)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        spec.loader = _Wrapping(spec.loader)
        return spec


def _wrap(worker):
    pool, rank, method, number, name = os.environ["TANDEM_TEST_DIE"].split(":")
    original = getattr(worker, method)
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

    setattr(worker, method, dying)


if "TANDEM_TEST_DIE" in os.environ:
    sys.meta_path.insert(0, _Finder())
