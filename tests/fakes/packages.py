# SPDX-License-Identifier: Apache-2.0
"""Packages that look installed and cannot be imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

VLLM_ARGUMENTS: Mapping[str, str] = {
    "model": "str",
    "block_size": "int | None",
    "compilation_config": "CompilationConfig",
    "disable_cascade_attn": "bool",
    "served_model_name": "str | list[str] | None",
}
"""Names and annotations."""


def install_vllm(
    folder: Path,
    *,
    version: str = "0.32.0",
    classes: Sequence[str] = (),
    module: str = "file",
) -> Path:
    """Put a vLLM that lists ``classes`` of models into ``folder``; returns the folder.

    Args:
        module: the module of vLLM that computes them.
    """
    models = folder / "vllm/model_executor/models/registry.py"
    models.parent.mkdir(parents=True)
    models.write_text("".join(f'    "{name}": ("{module}", "{name}"),\n' for name in classes))
    (folder / "vllm/engine").mkdir()
    arguments = "".join(f"    {name}: {kind} = None\n" for name, kind in VLLM_ARGUMENTS.items())
    (folder / "vllm/engine/arg_utils.py").write_text(f"class EngineArgs:\n{arguments}")
    (folder / "vllm/__init__.py").write_text("raise RuntimeError('vllm was imported')\n")
    facts = folder / f"vllm-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def install_sglang(folder: Path, *, version: str = "0.5.23") -> Path:
    """Put an SGLang that computes Qwen2 into ``folder``; returns the folder."""
    models = folder / "sglang/srt/models/qwen2.py"
    models.parent.mkdir(parents=True)
    models.write_text("class Qwen2ForCausalLM(nn.Module):\n    pass\n")
    fields = folder / "sglang/srt/arg_groups/fields/memory.py"
    fields.parent.mkdir(parents=True)
    size = "page_size: A[Optional[int], Arg(help='')] = 1"
    fields.write_text(f"class Memory:\n    {size}\n    sampling_backend: str = ''\n")
    (folder / "sglang/__init__.py").write_text("raise RuntimeError('sglang was imported')\n")
    facts = folder / f"sglang-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return folder
