# SPDX-License-Identifier: Apache-2.0
"""MO19: what is done with MindSpeed. ``tests/frameworks/test_megatron_core.py`` trains with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ADAPTOR = """
import sys

ARGUMENTS, SETTINGS = list(sys.argv), []
repatch = SETTINGS.append
"""
_USE = """
import json, sys
import tandem.engines.fsdp, tandem.workers.parts
from tandem.engines.mindspeed import adapt_megatron
early = [name for name in sys.modules if name.startswith(("mindspeed", "megatron"))]
adapt_megatron("mindspeed")
import mindspeed.megatron_adaptor as adaptor
print(json.dumps([early, sys.argv, adaptor.ARGUMENTS, adaptor.SETTINGS]))
"""
_BROKEN = """
import sys
from tandem.engines.mindspeed import adapt_megatron
try:
    adapt_megatron("mindspeed")
except ImportError:
    print(sys.argv[1:])
"""


def ended(program: str, *arguments: str, folder: Path) -> str:
    """Return the output of a program that finds the packages of ``folder``."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with a stub of MindSpeed."""
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed/__init__.py").write_text("")
    (tmp_path / "mindspeed/megatron_adaptor.py").write_text(_ADAPTOR)
    return tmp_path


def test_mo19_mindspeed_sees_no_arguments_and_computes_attention_by_its_operator(
    packages: Path,
) -> None:
    """What trains does not import it, or Megatron, before a device needs it."""
    output = ended(_USE, "--swap-attention", "7", folder=packages)
    early, arguments, seen, settings = json.loads(output)
    assert early == []
    assert arguments == ["-c", "--swap-attention", "7"]
    assert seen == ["-c"]
    assert settings == [{"use_flash_attn": True}]


def test_mo19_arguments_return_if_the_import_fails(packages: Path) -> None:
    (packages / "mindspeed/megatron_adaptor.py").write_text("import no_torch_npu")
    assert ended(_BROKEN, "word", folder=packages).strip() == "['word']"
