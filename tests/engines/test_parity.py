# SPDX-License-Identifier: Apache-2.0
"""V1: what vLLM generates with is the trainer's model, for each family, before and after updates,
and no tensor can be left out or changed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.rollout.feed import checkpoint_views
from tandem.rollout.vllm.engine import build
from tandem.rollout.vllm.library import of_vllm
from tandem.testing.contracts.rollout import EngineBench, check_engine
from tests.engines import parity
from tests.engines.bench import open_spec, running, write_model

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

REGISTRY = "model_executor.models.registry"
FAMILIES = (
    *("qwen2 tied", "qwen2 untied", "qwen3", "llama", "gemma", "phi3"),
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "dots1"),
)


@pytest.fixture(scope="module", params=FAMILIES)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineBench]:
    """An engine of each family. Its tests run in the order of this file."""
    folder = write_model(tmp_path_factory.mktemp("model"), request.param)
    with running(build, open_spec(folder)) as bench:
        yield bench


def test_v1_vllm_keeps_the_promises_of_rollout_engines(tmp_path: Path) -> None:
    """No other process is started to ask what the class of the model can do."""
    registry = of_vllm(REGISTRY, "ModelRegistry")
    registry.register_model("Qwen2ForCausalLM", "vllm.model_executor.models.qwen2:Qwen2ForCausalLM")
    asked_elsewhere = of_vllm(REGISTRY, "_LazyRegisteredModel")
    assert isinstance(registry.models["Qwen2ForCausalLM"], asked_elsewhere)
    assert check_engine(build, tmp_path) == []
    assert not isinstance(registry.models["Qwen2ForCausalLM"], asked_elsewhere)


def test_v1_log_probs_are_those_of_the_trainer_and_of_transformers(
    bench: EngineBench, tmp_path: Path
) -> None:
    parity.check_log_probs(bench, tmp_path)


def test_v1_a_response_ends_with_an_end_token_or_at_its_length(bench: EngineBench) -> None:
    parity.check_ends(bench)


def test_v1_an_update_without_a_tensor_is_refused_by_its_name(bench: EngineBench) -> None:
    """The names are compared before vLLM is asked. All tensors of Qwen2 are left out, and the
    first and the last one of other families.
    """
    names = [name for name, _ in checkpoint_views(bench.model)]
    left_out = names if bench.model.family == "qwen2" else (names[0], names[-1])
    parity.check_tensors_that_are_left_out(bench, names=left_out)


def test_v1_a_tensor_changed_by_a_tenth_is_seen_by_the_canary(bench: EngineBench) -> None:
    """An expert has to wait until a token of a canary goes there, which takes many versions."""
    parity.check_tensors_that_are_a_tenth_off(bench)


def test_v1_red_moe_whose_files_have_other_names(tmp_path: Path) -> None:
    """Transformers does not know this family, so that the trainer alone is compared."""
    with running(build, open_spec(write_model(tmp_path, "red-moe"))) as bench:
        parity.check_tensors_that_are_left_out(bench, names=["model.norm.weight"])
