# SPDX-License-Identifier: Apache-2.0
"""A rollout engine outside of tandem: a process of its own, with a copy of the weights of its own.

The child computes with transformers' modelling code. It gets weights tensor by tensor under their
names in checkpoint files, and answers one pickled call after the other over its standard streams.
It ends when its input ends, and thus with its parent.

``actor_rollout_ref.rollout.name=tests.fakes.external_engine:build`` selects it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tandem.api import Capacity, EngineDied, EngineFacts, EngineFailure
from tandem.rollout.factory import EngineSpec
from tandem.rollout.hf import HfRolloutConfig, HfRolloutEngine
from tandem.types import Completion, GenerationRequest, SliceSpec

ROOT = Path(__file__).parents[2]


class ExternalEngine:
    """An ``api.RolloutEngine`` whose calls go to a child process."""

    facts = EngineFacts(shares_weights=False, draws_by_key=True, stops_within_sequences=False)
    capacity = Capacity(num_rows=None, cache_tokens=None)

    def __init__(self, spec: EngineSpec) -> None:
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._counters: Mapping[str, float] = {}
        settings = HfRolloutConfig(spec.config.seed, spec.eos_ids, spec.config.max_num_seqs)
        self._manifest: list[SliceSpec] = self._call("open", spec.folder, settings)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._call("add", requests)

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Do nothing: nothing is kept between turns."""

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate the next batch to its end."""
        completions, self._counters = self._call("advance")
        return completions

    def settle(self) -> None:
        """Return at once: every call is answered when it is done."""

    def set_weights_version(self, version: int) -> bool:
        """Tag later tokens with ``version``."""
        self._call("set_weights_version", version)
        return True

    def metrics(self) -> Mapping[str, float]:
        """Return the child's counters as of its last advance."""
        return self._counters

    def sink(self) -> ExternalEngine:
        """Return this engine, which is its own sink."""
        return self

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the tensors of the child's model."""
        return self._manifest

    def begin(self, version: int) -> None:
        """Begin to take a version."""
        self._call("begin")

    def take(self, name: str, tensor: Tensor) -> None:
        """Send one tensor."""
        self._call("take", name, tensor.to("cpu", torch.float32, copy=True).numpy())

    def end(self) -> None:
        """End a version. Raise EngineFailure if a tensor is missing."""
        self._call("end")

    def sleep(self) -> bool:
        """Free the child's weights, unless there is something to generate."""
        return self._call("sleep")

    def wake(self) -> None:
        """Allocate the child's weights again."""
        self._call("wake")

    def close(self) -> None:
        """End the child."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _call(self, method: str, *args: object) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            pickle.dump((method, args), stdin)
            stdin.flush()
            error, result = pickle.load(stdout)
        except (OSError, EOFError) as lost:
            code = self._process.wait(10)
            raise EngineDied(f"the external engine's process ended with code {code}") from lost
        if error:
            raise EngineFailure(f"the external engine: {error}")
        return result


def build(spec: EngineSpec) -> ExternalEngine:
    """Build the engine."""
    return ExternalEngine(spec)


class Child:
    """The other end: an engine over a model of its own."""

    def open(self, folder: Path, settings: HfRolloutConfig) -> list[SliceSpec]:
        """Build the model without its weights. Return the tensors that it needs."""
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.weights = {name: weight.data for name, weight in module.named_parameters()}
        self.engine = HfRolloutEngine(module, settings)
        shapes = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        self.sizes = {name: weight.nbytes for name, weight in self.weights.items()}
        return [
            SliceSpec(name, torch.float32, shape, (0,) * len(shape), shape)
            for name, shape in shapes.items()
        ]

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self.engine.add(requests)

    def advance(self) -> tuple[list[Completion], Mapping[str, float]]:
        """Generate a batch."""
        return self.engine.advance(), self.engine.metrics()

    def set_weights_version(self, version: int) -> None:
        """Tag later tokens."""
        self.engine.set_weights_version(version)

    def begin(self) -> None:
        """Forget which tensors have come."""
        self.missing = set(self.weights)

    def take(self, name: str, values: Any) -> None:
        """Load one tensor."""
        self.weights[name].copy_(torch.from_numpy(values))
        self.missing.remove(name)

    def end(self) -> None:
        """Raise ValueError if a tensor is missing."""
        if self.missing:
            raise ValueError(f"weights are missing: {', '.join(sorted(self.missing))}")

    def sleep(self) -> bool:
        """Free the weights."""
        if not self.engine.sleep():
            return False
        for weight in self.weights.values():
            weight.untyped_storage().resize_(0)
        return True

    def wake(self) -> None:
        """Allocate the weights."""
        for name, weight in self.weights.items():
            weight.untyped_storage().resize_(self.sizes[name])


def serve() -> None:
    """Answer calls until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not get between the answers
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    child = Child()
    while True:
        try:
            method, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = ("", getattr(child, method)(*args))
        except (ValueError, KeyError, RuntimeError) as error:
            answer = (f"{type(error).__name__}: {error}", None)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
