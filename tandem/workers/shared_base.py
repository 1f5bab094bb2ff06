# SPDX-License-Identifier: Apache-2.0
"""The base that several runs of one process train adapters over: it is loaded once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import torch

from tandem.models.folder import fill_adapters
from tandem.models.language_model import NativeModel
from tandem.platforms.record import Platform
from tandem.rollout.joint import JointMember, JointPasses
from tandem.workers.job import PolicySpec
from tandem.workers.policies import open_policy, policy_folder


class SharedBase:
    """A base, and the joint passes of the runs over it. Runs open their policies on any thread."""

    def __init__(self, num_runs: int) -> None:
        self.passes = JointPasses(num_runs)
        self._lock = threading.Lock()
        self._base: NativeModel | None = None

    def open_policy(
        self, spec: PolicySpec, platform: Platform, *, dtype: torch.dtype, base_dtype: torch.dtype
    ) -> NativeModel:
        """Open a policy with adapters in ``dtype``. Errors as ``policies.open_policy``."""
        folder = policy_folder(spec)
        config = folder.decoder_config
        assert config is not None and config.adapters is not None, "runs share a base of adapters"
        with self._lock:
            if self._base is None:
                whole = replace(spec, adapters=None)
                base = open_policy(whole, platform, dtype=base_dtype)
                assert isinstance(base, NativeModel), "adapters are those of tandem's decoder"
                base.decoder.requires_grad_(False)
                self._base = base
        model = self._base.with_new_adapters(config, dtype)
        with torch.no_grad():
            fill_adapters(folder, model.trained_slices())
        return model


@dataclass(frozen=True, slots=True)
class RunOverBase:
    """A run over a shared base, by its index among them."""

    base: SharedBase
    index: int

    @property
    def member(self) -> JointMember:
        """The run's part in the joint passes."""
        return JointMember(self.base.passes, self.index)
