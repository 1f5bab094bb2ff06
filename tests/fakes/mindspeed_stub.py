# SPDX-License-Identifier: Apache-2.0
"""A stub of the package MindSpeed, which records in ``EVENTS`` what is done with it."""

from __future__ import annotations

from pathlib import Path

_ADAPTOR = """
import sys

from tests.fakes import cuda_double

EVENTS = [("import", list(sys.argv), [x for x in sys.modules if x.startswith("megatron")])]
cuda_double.install()


def repatch(settings):
    EVENTS.append(("repatch", settings))
    from megatron.core import parallel_state

    form = parallel_state.initialize_model_parallel

    def recorded(*sizes, **settings):
        EVENTS.append(("groups", sizes, settings))
        return form(*sizes, **settings)

    parallel_state.initialize_model_parallel = recorded
"""


def write_mindspeed(folder: Path) -> None:
    """Write the package into ``folder``, which has to be on the path of modules."""
    package = folder / "mindspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "megatron_adaptor.py").write_text(_ADAPTOR)
