# SPDX-License-Identifier: Apache-2.0
"""V1 for SGLang, with the real SGLang on the CPU: what it generates with is the trainer's model,
for each family, before and after updates, and no tensor can be left out or changed on the way. V3:
a tied model whose files have a head.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.rollout.feed import checkpoint_views
from tandem.rollout.sglang.engine import build
from tandem.testing.contracts.rollout import EngineBench
from tests.engines import parity
from tests.engines.bench import open_spec, running, write_model

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs sglang: make test-engines")

TIED_WITH_A_HEAD = "qwen2 tied, with a head in its files"
FAMILIES = (TIED_WITH_A_HEAD, "qwen3", "llama", "qwen3_moe", "dots1")
"""Qwen2 without a tied head is in ``test_sglang``."""
KWARGS = {"engine_kwargs": {"sglang": {"python": PYTHON}}}


@pytest.fixture(scope="module", params=FAMILIES)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineBench]:
    """An engine of each family. Its tests run in the order of this file."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == TIED_WITH_A_HEAD:
        parity.write_tied_model_with_a_head(folder)
        keys = {**KWARGS, "load_format": "safetensors"}
    else:
        write_model(folder, request.param)
        keys = KWARGS
    with running(build, open_spec(folder, **keys)) as bench:
        yield bench


def test_v1_and_v3_log_probs_are_those_of_the_trainer_and_of_transformers(
    bench: EngineBench, tmp_path: Path
) -> None:
    parity.check_log_probs(bench, tmp_path)


def test_v1_a_response_ends_with_an_end_token_or_at_its_length(bench: EngineBench) -> None:
    parity.check_ends(bench)


def test_v1_an_update_without_a_tensor_is_refused_by_its_name(bench: EngineBench) -> None:
    """The names are compared before SGLang is asked, for all families alike."""
    first, *_, last = (name for name, _ in checkpoint_views(bench.model))
    parity.check_tensors_that_are_left_out(bench, names=(first, last))


def test_v1_a_tensor_changed_by_a_tenth_is_seen_by_the_canary(bench: EngineBench) -> None:
    parity.check_tensors_that_are_a_tenth_off(bench)
