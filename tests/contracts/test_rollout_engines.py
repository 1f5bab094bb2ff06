# SPDX-License-Identifier: Apache-2.0
"""The contract suite of rollout engines, on ours and on one that is outside of tandem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.api import RolloutEngine
from tandem.models.hf import open_transformers_model
from tandem.models.language_model import LanguageModel
from tandem.platforms.capture import eager
from tandem.platforms.record import CPU
from tandem.rollout.factory import EngineSpec, build_dense, build_hf, build_paged
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.testing.contracts.rollout import CHECKS, check_engine
from tandem.types import Completion, GenerationRequest
from tests.fakes import external_engine, interpreted_triton


def _of_transformers(folder: Path) -> LanguageModel:
    return open_transformers_model(
        folder, dtype=torch.float32, trust_remote_code=False, random_seed=None
    )


def test_the_dense_engine_keeps_its_promises(tmp_path: Path) -> None:
    assert check_engine(build_dense, tmp_path) == []


def test_transformers_generate_keeps_its_promises(tmp_path: Path) -> None:
    assert check_engine(build_hf, tmp_path, make_model=_of_transformers) == []


def test_transformers_generate_with_weights_of_its_own_keeps_its_promises(tmp_path: Path) -> None:
    assert check_engine(build_hf, tmp_path) == []


def test_an_engine_outside_of_tandem_keeps_its_promises(tmp_path: Path) -> None:
    assert check_engine(external_engine.build, tmp_path) == []


class StaleEngine(NativeRolloutEngine):
    """Goes on with the keys and values of old weights, and does not say so."""

    def set_weights_version(self, version: int) -> bool:
        super().set_weights_version(version)
        self._is_outdated = False
        return True


class ScalingEngine(NativeRolloutEngine):
    """Reports log-probs of another temperature."""

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        completions = super().advance(max_steps)
        return [replace(one, log_probs=[x / 2 for x in one.log_probs]) for one in completions]


class LosingEngine(NativeRolloutEngine):
    """Loses the last sample of each request."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        super().add([replace(one, sample_ids=one.sample_ids[:-1] or (0,)) for one in requests])


class SleeplessEngine(NativeRolloutEngine):
    """Never frees anything."""

    def sleep(self) -> bool:
        return False


class DroppingEngine(external_engine.ExternalEngine):
    """Forgets one tensor of every version but the first."""

    num_versions = 0

    def begin(self, version: int) -> None:
        self.num_versions += 1
        super().begin(version)

    def take(self, name: str, tensor: Tensor) -> None:
        if self.num_versions == 1 or "down_proj" not in name:
            super().take(name, tensor)

    def end(self) -> None:
        if self.num_versions == 1:
            super().end()


@pytest.mark.parametrize(
    ("engine", "check"),
    [
        (StaleEngine, "each_token_has_its_version"),
        (ScalingEngine, "tokens_have_the_models_log_probs"),
        (LosingEngine, "tokens_have_the_models_log_probs"),
        (SleeplessEngine, "a_sleeping_engine_wakes_up"),
        (DroppingEngine, "new_weights_replace_old_ones"),
    ],
)
def test_the_suite_finds_engines_that_break_a_promise(
    engine: Any, check: str, tmp_path: Path
) -> None:
    def build(spec: EngineSpec) -> RolloutEngine:
        if issubclass(engine, external_engine.ExternalEngine):
            return engine(spec)
        dense = build_dense(spec)
        assert isinstance(dense, NativeRolloutEngine)
        return engine(dense._decoder, dense._config)

    failed = [failure.partition(":")[0] for failure in check_engine(build, tmp_path)]
    assert check in failed
    assert set(failed) <= CHECKS.keys()


def test_the_paged_engine_keeps_its_promises(tmp_path: Path) -> None:
    interpreted_triton.install()

    def build(spec: EngineSpec) -> RolloutEngine:
        from tandem.rollout.paged.engine import PagedRolloutEngine

        paged = build_paged(spec)
        assert isinstance(paged, PagedRolloutEngine)
        return PagedRolloutEngine(
            paged._decoder,
            paged._config,
            make_capturer=eager,
            num_multiprocessors=1,
            page_tokens=8,
        )

    platform = replace(CPU, kernels="triton", num_multiprocessors=lambda: 1)
    assert check_engine(build, tmp_path, platform=platform) == []
