# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for two packages that SGLang imports at its start and that a CPU cannot have.

sgl_kernel has no wheel for CPUs, and torchvision's wheel needs CUDA's libraries. The stand-ins are
written into the packages of the Python that runs this file.

A dense text model on a CPU without AMX calls neither: SGLang then computes norms, activations,
rotary positions and attention in torch. A call of anything else raises an error with its name.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

KERNELS = """\
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    absent.__name__ = name
    return absent
"""
CLASSES = """\
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
MODES = """\
import enum
class InterpolationMode(enum.Enum):
    NEAREST = "nearest"; NEAREST_EXACT = "nearest-exact"; BILINEAR = "bilinear"
    BICUBIC = "bicubic"; BOX = "box"; HAMMING = "hamming"; LANCZOS = "lanczos"
from . import functional, v2
"""
VERSION = '__version__ = "0.28.0"\nfrom . import transforms, io, ops\n'
FILES = {
    "sgl_kernel/__init__.py": KERNELS,
    "torchvision/__init__.py": VERSION + CLASSES,
    "torchvision/transforms/__init__.py": MODES + CLASSES,
    "torchvision/transforms/functional.py": "from . import InterpolationMode\n" + CLASSES,
    "torchvision/transforms/v2/__init__.py": "from . import functional\n" + CLASSES,
    "torchvision/transforms/v2/functional.py": "from .. import InterpolationMode\n" + CLASSES,
    "torchvision/io.py": CLASSES,
    "torchvision/ops/__init__.py": CLASSES,
    "torchvision/ops/boxes.py": CLASSES,
}
"""The files of both packages and their contents."""


def main() -> None:
    """Write the stand-ins."""
    for name, text in FILES.items():
        file = Path(sysconfig.get_path("purelib")) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
