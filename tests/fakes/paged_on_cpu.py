# SPDX-License-Identifier: Apache-2.0
"""The engine of accelerators on a CPU, its kernels interpreted.

``actor_rollout_ref.rollout.name=tests.fakes.paged_on_cpu:build`` selects it.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.api import RolloutEngine
from tandem.platforms.record import CPU
from tandem.rollout.factory import EngineSpec, build_paged
from tests.fakes import interpreted_triton


def build(spec: EngineSpec) -> RolloutEngine:
    interpreted_triton.install()
    return build_paged(replace(spec, platform=replace(CPU, kernels="triton")))
