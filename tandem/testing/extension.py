# SPDX-License-Identifier: Apache-2.0
"""The extension of torch that all doubles of devices are made of. Another version of torch needs
another build, and each needs Python's headers.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from tandem.testing.compiling import NATIVE, Build, built

_NAME = "tandem_double"
_FLAGS = ("-O1", "-std=c++20", "-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={_NAME}")
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def open_extension() -> ModuleType:
    """The extension, loaded into this process.

    Raises:
        UserError: it has to be built and cannot be.
    """
    path = built_extension()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None, f"{path} is no extension module"
    assert spec.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_extension() -> Path:
    """The library's file. The first call builds it, which takes a minute; others wait for that.

    Raises:
        UserError: it cannot be built here.
    """
    torch_folder, headers = Path(torch.__file__).parent, Path(sysconfig.get_paths()["include"])
    include = torch_folder / "include"
    folders = (include, include / "torch/csrc/api/include", headers)
    return built(
        Build(
            file=f"{_NAME}.so",
            sources=tuple(sorted(NATIVE.glob("*.cpp"))),
            arguments=(*_FLAGS, *(f"-isystem{folder}" for folder in folders)),
            libraries=(f"-L{torch_folder / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)),
            included=tuple(sorted(NATIVE.glob("*.h"))),
            needed={"Python's headers": headers / "Python.h"},
            conditions=f"{torch.__version__} {sys.version}",
        )
    )
