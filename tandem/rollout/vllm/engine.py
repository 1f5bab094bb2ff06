# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``LLMEngine`` as a rollout engine, in the process of the worker.

There are no child processes and no ports. Tokens are drawn by the keyed draw of the native engines
(``draw``, ``second_runner``), and weights come through vLLM's own loader (``weights``). After each
update a canary must have the trainer's log-probs before any completion is returned (``canary``).
Prefix caches are keyed by weights version, and emptied unless the engine keeps its cache.

A run may have several engines, each on one device or split over several (``ranks``).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from tandem.api import Capacity, EngineFailure, RolloutEngine
from tandem.platforms.environment import set_defaults
from tandem.rollout.attached.engine import build as build_attached
from tandem.rollout.canary import NUM_TOKENS, canary_tokens, expected_log_probs, require_equal
from tandem.rollout.completion import complete
from tandem.rollout.factory import EngineSpec
from tandem.rollout.feed import manifest_of
from tandem.rollout.glm_network import config_as_glm
from tandem.rollout.keyed_random import stream_keys
from tandem.rollout.sampler import DrawRows, DrawRule, draw_rows
from tandem.rollout.step_watch import StepWatch
from tandem.rollout.vllm.arguments import engine_arguments
from tandem.rollout.vllm.draw import GREEDY, DrawnLogProbs, Stream, processor_class
from tandem.rollout.vllm.experts import compute_own_experts_on_cpus
from tandem.rollout.vllm.library import (
    ENVIRONMENT,
    SECOND_RUNNER,
    import_engine,
    of_vllm,
    register_model,
    undisturbed_process,
)
from tandem.rollout.vllm.ranks import Ranks
from tandem.rollout.vllm.second_runner import FIRST_VERSION, KeyedSampler
from tandem.rollout.vllm.weights import LoadedModel, VllmSink
from tandem.types import Completion, GenerationRequest, TokenIds

_CANARY = "canary"
_FIRST, _LATER = -1, 0
"""Priorities: a canary does not wait for samples."""


@dataclass(slots=True)
class _Sample:
    sample_id: int
    prompt_ids: TokenIds
    stream: Stream
    eos_ids: TokenIds


@dataclass(frozen=True)
class _Draws:
    """The streams of the samples by their names, and the log-probs on their way into them."""

    streams: dict[str, Stream] = field(default_factory=dict[str, Stream])
    log_probs: DrawnLogProbs = field(default_factory=DrawnLogProbs)


class VllmRolloutEngine:
    """An ``api.RolloutEngine`` over a vLLM engine, which ``build`` makes."""

    def __init__(self, spec: EngineSpec, engine: Any, *, draws: _Draws, ranks: Ranks) -> None:
        """Take ``engine``, whose tokens are drawn by ``draws``."""
        self._spec, self._engine, self._ranks = spec, engine, ranks
        self._streams, self._log_probs = draws.streams, draws.log_probs
        config, cache = spec.config, engine.vllm_config.cache_config
        self.facts = spec.own_facts
        self.capacity = Capacity(config.max_num_seqs, cache.num_gpu_blocks * cache.block_size)
        self._dtype: torch.dtype = engine.vllm_config.model_config.dtype
        worker = engine.model_executor.driver_worker
        target = LoadedModel(
            get_model=worker.model_runner.get_model,
            device=torch.device(worker.device),
            vllm_config=worker.vllm_config,
            family=spec.model.family,
        )
        self._sink = VllmSink(
            target,
            manifest_of(spec.model, self._dtype),
            on_end=self._expect,
            loaded_by_any=ranks.loaded_by_any if config.expert_parallel_size > 1 else None,
        )
        self._samples: dict[str, _Sample] = {}
        self._finished: list[Completion] = []
        self._expected_R: Tensor | None = None
        self._version = -1
        self._watch = StepWatch("vLLM")
        self._is_asleep = self._is_closed = False
        self._num_requests = self._num_prefilled_tokens = 0
        self._num_cached_tokens = self._num_decoded_tokens = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        for request in requests:
            sampling = request.sampling
            self._ranks.note((tuple(request.sample_ids), tuple(request.prompt_ids), sampling))
            starts = [request.first_index] * len(request.sample_ids)
            keys = stream_keys(
                self._spec.config.seed, request.sample_ids, first_indices=starts
            ).tolist()
            eos_ids = () if sampling.ignore_eos else tuple(self._spec.eos_ids)
            for sample_id, key in zip(request.sample_ids, keys, strict=True):
                stream = Stream(key, DrawRule.of(sampling))
                stream.use_version(self._version)
                name = str(sample_id)
                self._samples[name] = _Sample(sample_id, request.prompt_ids, stream, eos_ids)
                length = sampling.max_new_tokens
                self._request(
                    name, request.prompt_ids, stream=stream, eos_ids=eos_ids, length=length
                )

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Do nothing: earlier turns are in the engine's prefix cache, which gives way by itself."""

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence finishes, and until the canary has passed.

        Collective over the ranks of an engine.
        """
        num_steps = 0
        self._ranks.note((self._version, -1 if max_steps is None else max_steps))
        self._ranks.require_agreement()
        while self._has_work() and num_steps != max_steps:
            self._step()
            num_steps += 1
        self._ranks.require_agreement()
        if _CANARY in self._streams:
            return []
        finished, self._finished = self._finished, []
        return finished

    def settle(self) -> None:
        """Wait for the step that the device computes ahead, and read it.

        Collective over the ranks of an engine.
        """
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:
            return
        states = of_vllm("v1.core.sched.interface", "PauseState")
        core.scheduler.set_pause_state(states.PAUSED_ALL)
        try:
            while core.batch_queue:
                self._step()
        finally:
            core.scheduler.set_pause_state(states.UNPAUSED)

    def set_weights_version(self, version: int) -> bool:
        """Tag later tokens with ``version``, and check weights that have come."""
        is_new = self._expected_R is not None and _CANARY not in self._streams
        if version == self._version and not is_new:
            return True
        if not self.facts.keeps_cache and not self._engine.reset_prefix_cache(
            reset_running_requests=True
        ):
            raise EngineFailure("vLLM did not empty its prefix cache")
        self._version = version
        self._log_probs.read()  # by which the second model runner counts tokens
        for sample in self._samples.values():
            sample.stream.use_version(version)
        if is_new:
            prompt, forced = canary_tokens(self._spec.model.lm_head_weight.shape[0], version)
            stream = Stream(0, GREEDY, forced)
            self._request(
                _CANARY, prompt, stream=stream, eos_ids=(), length=NUM_TOKENS, priority=_FIRST
            )
        return True

    def metrics(self) -> Mapping[str, float]:
        """Return how many tokens of finished sequences were prefilled, found in the prefix cache,
        and decoded; with ``disable_log_stats=False``, vLLM's own counters too.
        """
        counters = {
            "num_prefilled_tokens": self._num_prefilled_tokens,
            "num_cached_tokens": self._num_cached_tokens,
            "num_decoded_tokens": self._num_decoded_tokens,
        }
        if not self._spec.config.disable_log_stats:
            for one in self._engine.get_metrics():
                if isinstance(one, of_vllm("v1.metrics.reader", "Counter")):
                    name = one.name.replace(":", "_")
                    counters[name] = counters.get(name, 0) + one.value
        return counters

    def sink(self) -> VllmSink:
        """Return where new weights go."""
        return self._sink

    def sleep(self) -> bool:
        """Free weights and cache, unless there is something to generate."""
        self.settle()
        if self._samples or self._finished:
            return False
        self._drop_canary()
        if not self._is_asleep and self._engine.vllm_config.model_config.enable_sleep_mode:
            self._engine.sleep(level=2)
        self._is_asleep = True
        return True

    def wake(self) -> None:
        """Allocate weights and cache again."""
        if self._is_asleep and self._engine.vllm_config.model_config.enable_sleep_mode:
            # vLLM asks the driver for memory, and what torch keeps of training is not free there.
            torch.accelerator.empty_cache()
            self._engine.wake_up()
        self._is_asleep = False

    def close(self) -> None:
        """Free the engine, and end the process groups that vLLM opened."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.close()
        self._engine.engine_core.shutdown()
        self._ranks.leave()

    def _has_work(self) -> bool:
        if _CANARY in self._streams:
            return bool(self._samples or self._finished)
        return bool(self._samples) and not self._finished

    def _request(
        self,
        name: str,
        prompt_ids: TokenIds,
        *,
        stream: Stream,
        eos_ids: TokenIds,
        length: int,
        priority: int = _LATER,
    ) -> None:
        self._streams[name] = stream
        params = of_vllm("sampling_params", "SamplingParams")(
            temperature=0.0,
            seed=0,  # unused; without one, the second model runner takes numpy's next number
            max_tokens=length,
            detokenize=False,
            ignore_eos=not eos_ids,
            stop_token_ids=list(eos_ids),
            output_kind=of_vllm("sampling_params", "RequestOutputKind").FINAL_ONLY,
            extra_args={"stream": name},
        )
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": str(self._version)}
        try:
            # By number, not by time, which would order the requests of each rank in its own way.
            self._num_requests += 1
            self._engine.add_request(
                name, prompt, params, arrival_time=float(self._num_requests), priority=priority
            )
        except ValueError as error:
            raise EngineFailure(f"vLLM: {first_line(error)}") from error

    def _step(self) -> None:
        self._sink.require_whole()
        try:
            with self._watch.watching():
                outputs = self._engine.step()
        except RuntimeError as error:
            raise EngineFailure(f"vLLM: {first_line(error)}") from error
        for output in outputs:
            if output.finished:
                self._finish(output)

    def _finish(self, output: Any) -> None:
        token_ids = list(output.outputs[0].token_ids)
        self._log_probs.read()
        log_probs = self._streams[output.request_id].log_probs[: len(token_ids)]
        if len(log_probs) != len(token_ids):
            raise EngineFailure("vLLM: tokens have come without their log-probs")
        if output.request_id == _CANARY:
            self._require_right_weights(log_probs)
            del self._streams[_CANARY]
            return
        stream = self._streams.pop(output.request_id)
        sample = self._samples.pop(output.request_id)
        num_cached = output.num_cached_tokens or 0
        self._num_prefilled_tokens += len(sample.prompt_ids) - num_cached
        self._num_cached_tokens += num_cached
        self._num_decoded_tokens += len(token_ids)
        self._ranks.note((sample.sample_id, tuple(token_ids)))
        self._finished.append(
            complete(
                sample.sample_id,
                token_ids,
                log_probs=log_probs,
                eos_ids=sample.eos_ids,
                versions=stream.versions,
            )
        )

    def _require_right_weights(self, log_probs: Sequence[float]) -> None:
        """Compare the log-probs of a canary. Until they are right, no completion is returned."""
        assert self._expected_R is not None, "a canary runs only after an update"
        require_equal(
            self._expected_R,
            torch.tensor(log_probs),
            engine="vLLM",
            version=self._version,
            dtypes=(self._spec.model.lm_head_weight.dtype, self._dtype),
            is_quantized=self._spec.config.quantization is not None,
        )
        self._expected_R = None

    def _expect(self, version: int) -> None:
        self._drop_canary()
        self._expected_R = expected_log_probs(self._spec.model, version)

    def _drop_canary(self) -> None:
        self._expected_R = None
        if self._streams.pop(_CANARY, None) is not None:
            self._engine.abort_request([_CANARY])


def build(spec: EngineSpec) -> RolloutEngine:
    """Build the engine with vLLM in this process, or over the servers that are to be attached.

    Raises:
        EngineFailure: vLLM cannot serve the model, or a server does not answer.
    """
    if spec.config.attaches_servers:
        return build_attached(spec)
    return build_here(spec)


def build_here(spec: EngineSpec) -> VllmRolloutEngine:
    """Build the engine with vLLM in this process. Collective over the processes of a pool.

    Raises:
        EngineFailure: vLLM cannot serve the model on this device.
    """
    set_defaults(ENVIRONMENT)
    if spec.config.expert_parallel_size > 1 and spec.platform.device_type == "cpu":
        compute_own_experts_on_cpus()
    spec.warn_of_precision()
    draws = _Draws()
    ranks = Ranks(spec.config.ranks_per_engine)
    try:
        with undisturbed_process(), tempfile.TemporaryDirectory(prefix="tandem-vllm-") as folder:
            import_engine()
            arguments = _arguments(spec, Path(folder))
            engine = _start(spec, draws, arguments=arguments, executor=ranks.executor_class())
    except EngineFailure:
        raise
    except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
        raise EngineFailure(f"vLLM cannot serve {spec.folder}: {first_line(error)}") from error
    return VllmRolloutEngine(spec, engine, draws=draws, ranks=ranks)


def _arguments(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """Return the arguments of vLLM.

    Args:
        folder: gets the config.json of a model that vLLM knows under another name.
    """
    arguments, decoder = engine_arguments(spec), spec.model.decoder
    path = spec.folder / "config.json"
    if decoder is None or not path.is_file():
        return arguments
    hf_config = json.loads(path.read_text(encoding="utf-8"))
    config = config_as_glm(hf_config, head_dim=decoder.config.head_dim)
    if config is not None:
        spec.warn_of_unread_files("vLLM")
        (folder / path.name).write_text(json.dumps(config), encoding="utf-8")
        arguments |= {"model": str(folder), "load_format": "dummy"}
    return arguments


def _start(
    spec: EngineSpec,
    draws: _Draws,
    *,
    arguments: Mapping[str, Any],
    executor: type,
) -> Any:
    """Return vLLM's engine, whose tokens are drawn by ``draws``."""

    def stream_of(params: Any) -> Stream:
        return draws.streams[params.extra_args["stream"]]

    draw = _draw_rows(spec)
    if is_old := of_vllm("", "__version_tuple__")[:2] < FIRST_VERSION:
        set_defaults({SECOND_RUNNER: "0"})
    given = of_vllm("", "EngineArgs")(**arguments, distributed_executor_backend=executor)
    register_model(Path(arguments["model"]))  # after vLLM's plug-ins, which may register others
    usage = of_vllm("usage.usage_lib", "UsageContext").ENGINE_CONTEXT
    vllm_config = given.create_engine_config(usage)
    draws_in_sampler = vllm_config.use_v2_model_runner
    if draws_in_sampler and is_old:
        raise EngineFailure(f"vLLM: unset the environment variable {SECOND_RUNNER}")
    if not draws_in_sampler:
        processor = processor_class(stream_of, log_probs=draws.log_probs, draw_rows=draw)
        vllm_config.model_config.logits_processors = [processor]
    engine = of_vllm("v1.engine.llm_engine", "LLMEngine")(
        vllm_config, executor, log_stats=not spec.config.disable_log_stats, multiprocess_mode=False
    )
    if draws_in_sampler:
        runner = engine.model_executor.driver_worker.model_runner
        runner.sampler = KeyedSampler(
            runner.sampler, stream_of, log_probs=draws.log_probs, draw_rows=draw
        )
    return engine


def _draw_rows(spec: EngineSpec) -> DrawRows:
    """Return the draw for the device of the engine."""
    if spec.platform.kernels == "triton":
        from tandem.rollout.paged.kernels import sampling

        return sampling.KernelDraws()
    return draw_rows


def first_line(error: Exception) -> str:
    """Return an error in one line, with its kind."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join((*map(str, first["loc"]), first["msg"]))
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
