# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine. It runs in child processes of the worker, in an interpreter of its
own, because it pins other versions of torch and transformers.

Tokens are drawn by the keyed draw of the native engines (``scheduler``), and weights come through
SGLang's own loader (``weights``). After each update a canary must have the trainer's log-probs
before any completion is returned (``rollout.canary``). Prefix caches are keyed by weights version,
and emptied unless the engine keeps its cache. An engine over several devices has a scheduler for
each, and all of them are children of the first of its processes (``follower``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.api import Capacity, EngineFailure
from tandem.platforms.select import DTYPES
from tandem.rollout.canary import (
    CANARY_LENGTH,
    NUM_TOKENS,
    canary_tokens,
    expected_log_probs,
    require_equal,
)
from tandem.rollout.completion import complete
from tandem.rollout.factory import EngineSpec
from tandem.rollout.feed import manifest_of
from tandem.rollout.glm_network import config_as_glm
from tandem.rollout.keyed_random import stream_keys
from tandem.rollout.resting import Resting
from tandem.rollout.sglang.arguments import FREE_POSITIONS, engine_arguments
from tandem.rollout.sglang.client import SglangProcess
from tandem.rollout.sglang.follower import Follower
from tandem.rollout.sglang.keys import interpreter
from tandem.rollout.sglang.weights import SglangSink, SharedMemory
from tandem.types import Completion, GenerationRequest, TokenIds

_GREEDY = (0.0, -1, 1.0)
_DEFAULT_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class _Sample:
    num_prompt_tokens: int
    eos_ids: TokenIds


class SglangRolloutEngine(Resting):
    """An ``api.RolloutEngine`` over a child process."""

    def __init__(
        self, spec: EngineSpec, process: SglangProcess, *, memory: SharedMemory, dtype: torch.dtype
    ) -> None:
        """Take the process, which maps ``memory`` and computes in ``dtype``."""
        self._spec, self._process, self._memory, self._dtype = spec, process, memory, dtype
        self.facts = spec.own_facts
        self.capacity = Capacity(spec.config.max_num_seqs, int(process.facts["cache_tokens"]))
        self._sink = SglangSink(
            process,
            manifest_of(spec.model, dtype),
            family=spec.model.family,
            memory=memory,
            keeps_cache=self.facts.keeps_cache,
            on_end=self._expect,
        )
        self._samples: dict[int, _Sample] = {}
        self._expected_R: Tensor | None = None
        self._version = -1
        self._is_closed = False
        self._num_prefilled_tokens = self._num_decoded_tokens = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        samples: list[dict[str, Any]] = []
        for request in requests:
            sampling = request.sampling
            eos_ids = () if sampling.ignore_eos else tuple(self._spec.eos_ids)
            starts = [request.first_index] * len(request.sample_ids)
            keys = stream_keys(self._spec.config.seed, request.sample_ids, first_indices=starts)
            rule = (sampling.temperature, sampling.top_k, sampling.top_p)
            for sample_id, key in zip(request.sample_ids, keys.tolist(), strict=True):
                self._samples[sample_id] = _Sample(len(request.prompt_ids), eos_ids)
                samples.append(
                    _message(
                        sample_id,
                        request.prompt_ids,
                        eos_ids=eos_ids,
                        length=sampling.max_new_tokens,
                        key=key,
                        rule=rule,
                    )
                )
        self._process.call("add", {"samples": samples})

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence finishes. The canary of new weights comes first."""
        if not self._samples:
            return []
        if self._expected_R is not None:
            self._check_weights(self._expected_R)
            self._expected_R = None
        found = self._process.call("advance", {"max_steps": max_steps})
        return [self._complete(one) for one in found]

    def set_weights_version(self, version: int) -> bool:
        """Use the weights that the sink has received as ``version``."""
        assert version == self._version, "each version comes through the sink"
        return True

    def metrics(self) -> Mapping[str, float]:
        """Return how many tokens of finished sequences were prefilled and decoded."""
        return {
            "num_prefilled_tokens": self._num_prefilled_tokens,
            "num_decoded_tokens": self._num_decoded_tokens,
        }

    def sink(self) -> SglangSink:
        """Return where new weights go."""
        return self._sink

    def sleep(self) -> bool:
        """Return whether there is nothing to generate. No memory is freed."""
        return not self._samples

    def close(self) -> None:
        """End SGLang's processes; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._memory.close()
        self._process.close()

    def _check_weights(self, expected_R: Tensor) -> None:
        prompt, forced = canary_tokens(self._spec.model.lm_head_weight.shape[0], self._version)
        sample = _message(
            -1, prompt, eos_ids=(), length=NUM_TOKENS, key=0, rule=_GREEDY, forced=forced
        )
        found = self._process.call("canary", {"sample": sample})
        dtypes = (self._spec.model.lm_head_weight.dtype, self._dtype)
        found_R = torch.tensor(found["log_probs"])
        require_equal(expected_R, found_R, engine="SGLang", version=self._version, dtypes=dtypes)

    def _complete(self, found: dict[str, Any]) -> Completion:
        sample = self._samples.pop(found["id"])
        self._num_prefilled_tokens += sample.num_prompt_tokens - found["cached"]
        self._num_decoded_tokens += len(found["tokens"])
        return complete(
            found["id"],
            found["tokens"],
            log_probs=found["log_probs"],
            eos_ids=sample.eos_ids,
            versions=[(start, version) for start, version in found["versions"]],
        )

    def _expect(self, version: int) -> None:
        self._version = version
        self._expected_R = expected_log_probs(self._spec.model, version)


def build(spec: EngineSpec) -> SglangRolloutEngine | Follower:
    """Build the engine. The first process of an engine over several devices holds all of it.

    Raises:
        EngineFailure: SGLang cannot serve the model on this device.
    """
    if spec.rank % spec.config.ranks_per_engine == 0:
        return build_here(spec)
    manifest = manifest_of(spec.model, spec.model.lm_head_weight.dtype)
    return Follower(spec.own_facts, Capacity(spec.config.max_num_seqs, None), manifest=manifest)


def build_here(spec: EngineSpec) -> SglangRolloutEngine:
    """Start SGLang, with a scheduler for each device of the engine.

    Raises:
        EngineFailure: SGLang cannot serve the model on this device.
    """
    path = spec.folder / "config.json"
    hf_config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    positions = hf_config.get("max_position_embeddings", _DEFAULT_POSITIONS)
    arguments = engine_arguments(spec, max_positions=positions)
    spec.warn_of_precision()
    decoder = spec.model.decoder
    config = None if decoder is None else config_as_glm(hf_config, head_dim=decoder.config.head_dim)
    if config is not None:
        spec.warn_of_unread_files("SGLang")
        arguments["load_format"] = "dummy"
    memory = SharedMemory(manifest_of(spec.model, DTYPES[arguments["dtype"]]))
    first = {
        "arguments": arguments,
        "config": config,
        "num_rows": spec.config.max_num_seqs,
        "weights_fd": memory.fd,
        "weights_bytes": memory.num_bytes,
    }
    try:
        process = SglangProcess(
            interpreter(spec.config.engine_kwargs.sglang),
            first=first,
            memory_fd=memory.fd,
            on_cpu=spec.platform.device_type == "cpu",
            num_schedulers=spec.config.ranks_per_engine,
        )
    except EngineFailure:
        memory.close()
        raise
    engine = SglangRolloutEngine(spec, process, memory=memory, dtype=DTYPES[arguments["dtype"]])
    try:
        _require_room(spec, process.facts["cache_tokens"])
    except EngineFailure:
        engine.close()
        raise
    return engine


def _require_room(spec: EngineSpec, cache_tokens: int) -> None:
    """Raise EngineFailure if the longest sequence does not fit into SGLang's cache.

    SGLang would cut longer responses without a word.
    """
    if spec.max_length is None:
        return
    needed = max(spec.max_length, CANARY_LENGTH) + FREE_POSITIONS
    if cache_tokens < needed:
        raise EngineFailure(
            f"SGLang: its cache has room for {cache_tokens} tokens, and the longest sequence needs "
            f"{needed} (data.max_prompt_length + data.max_response_length + {FREE_POSITIONS}): "
            "raise actor_rollout_ref.rollout.gpu_memory_utilization, or leave "
            "engine_kwargs.sglang.max_total_tokens out"
        )


def _message(  # noqa: PLR0913 - the fields of a message
    sample_id: int,
    prompt_ids: TokenIds,
    *,
    eos_ids: TokenIds,
    length: int,
    key: int,
    rule: tuple[float, int, float],
    forced: TokenIds = (),
) -> dict[str, Any]:
    """Return a sample as ``program.Program`` reads it."""
    row = {"key": key, "start": len(prompt_ids), "rule": list(rule), "forced": list(forced)}
    return {
        "id": sample_id,
        "prompt": list(prompt_ids),
        "length": length,
        "eos": list(eos_ids),
        "draw": row,
    }
