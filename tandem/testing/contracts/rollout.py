# SPDX-License-Identifier: Apache-2.0
"""The contract suite of rollout engines: checks that run on any engine, ours or a third party's.

``check_engine`` builds an engine as a run does, with a tiny random Qwen2 on the CPU, and runs every
check in order. A test of a third party is one line::

    assert check_engine(my_package.engine.build, tmp_path) == []

Each token's log-prob is compared with the trainer's model. The random weights are large, which
makes stale ones visible.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.api import EngineFailure, Rollout, RolloutEngine
from tandem.config.schema.rollout import RolloutConfig
from tandem.data.packing import TrainSequence, pack
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.platforms.record import CPU, Platform
from tandem.rollout.factory import EngineSpec
from tandem.rollout.feed import FedRollout, WeightFeed
from tandem.testing.contracts.check import ContractError, require
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams

LOG_PROB_ERROR = 1e-4
"""The bound on the difference of log-probs from the trainer's, in fp32."""

TINY_QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""The configuration of a model of two layers whose log-probs depend strongly on every weight."""
_EOS = (0, 1, 2, 3)
_MAX_ROWS = 4
_PROMPTS = ((5, 6, 7, 8), (11, 12), (20, 21, 22, 23, 24, 25, 26))
_SAMPLED = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=8)
_FILTERED = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=6)
_GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=8, ignore_eos=True)
_FAILURE_S = 30.0
"""The longest that an engine may take to notice that its process has died."""

Weights = list[Tensor]


@dataclass
class EngineBench:
    """An engine under test, and the policy whose weights it generates with.

    Attributes:
        rollout: the engine as the pipeline drives it; versions arrive through ``use``.
        version: the version in use.
        processes: the processes that the engine started.
    """

    engine: RolloutEngine
    rollout: Rollout
    model: LanguageModel
    version: int = 0
    processes: frozenset[int] = frozenset()
    num_samples: int = field(default=0)

    def request(
        self, prompt: int, *, n: int = 1, sampling: SamplingParams = _SAMPLED
    ) -> GenerationRequest:
        """Return a request for ``n`` new samples of one of the prompts."""
        ids = tuple(range(self.num_samples, self.num_samples + n))
        self.num_samples += n
        return GenerationRequest(ids, _PROMPTS[prompt], sampling)

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[int, Completion]:
        """Add requests and advance until all work is done. Return the completions by sample id."""
        self.rollout.add(requests)
        return self.drain(requests)

    def drain(
        self, requests: Sequence[GenerationRequest], early: Sequence[Completion] = ()
    ) -> dict[int, Completion]:
        """Advance until all work is done. Return the completions by sample id.

        Args:
            requests: all requests that were added.
            early: completions that were already collected.
        """
        finished = list(early)
        while completions := self.rollout.advance():
            finished += completions
        found = sorted(completion.sample_id for completion in finished)
        expected = sorted(i for request in requests for i in request.sample_ids)
        require(found == expected, f"samples {expected} were requested, {found} finished")
        return {completion.sample_id: completion for completion in finished}

    def use_new_weights(self, seed: int) -> None:
        """Replace the policy's weights in place, as a trainer or the weight link does."""
        self.rollout.settle()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.module.parameters():
                noise = 0.05 * torch.randn(weight.shape, generator=generator)
                weight.add_(noise.to(weight.device))
        self.version += 1
        require(self.rollout.set_weights_version(self.version), "a lone engine was not ready")

    def weights(self) -> Weights:
        """Copy the policy's weights."""
        return [weight.detach().clone() for weight in self.model.module.parameters()]

    def log_probs(self, request: GenerationRequest, completion: Completion) -> Tensor:
        """Return the trainer's log-probs (R,) of a response, and check that its draws are legal."""
        sampling, tokens = request.sampling, torch.tensor(completion.token_ids)
        batch = pack([TrainSequence(0, request.prompt_ids, completion.token_ids)])
        with torch.no_grad():
            h_RD = self.model.hidden(batch)[batch.source_R]
            logits_RV = F.linear(h_RD, self.model.lm_head_weight).float().cpu()
        scaled_RV = torch.log_softmax(logits_RV / (sampling.temperature or 1.0), -1)
        chosen_R = scaled_RV.gather(1, tokens[:, None])[:, 0]
        rank_R = (scaled_RV > chosen_R[:, None] + LOG_PROB_ERROR).sum(-1)
        if sampling.temperature == 0:
            require(bool((rank_R == 0).all()), "a greedy token is not the likeliest one")
        if sampling.top_k > 0:
            require(bool((rank_R < sampling.top_k).all()), "a token lies outside of top-k")
        return chosen_R


def check_engine(
    build: Callable[[EngineSpec], RolloutEngine],
    folder: Path,
    *,
    platform: Platform = CPU,
    make_model: Callable[[Path], LanguageModel] | None = None,
) -> list[str]:
    """Run all checks on an engine, and return ``name: reason`` of each failure.

    Args:
        build: the function that ``actor_rollout_ref.rollout.name`` would name.
        folder: an empty folder for the model.
        platform: the platform in the engine's spec.
        make_model: opens the policy in that folder; None opens it with our decoder.
    """
    (folder / "config.json").write_text(json.dumps(TINY_QWEN2))
    open_model(str(folder), dtype=torch.float32, device="cpu", random_seed=7).save(folder)
    if make_model is None:
        model = open_model(str(folder), dtype=torch.float32, device=platform.device_type)
    else:
        model = make_model(folder)
    model.module.requires_grad_(False)
    before = _children()
    config = RolloutConfig(max_num_seqs=_MAX_ROWS, max_num_batched_tokens=64, seed=3)
    engine = build(EngineSpec(model, folder, config, _EOS, platform))
    sink = engine.sink()
    rollout: Rollout = engine if sink is None else FedRollout(engine, WeightFeed(model, sink))
    bench = EngineBench(engine, rollout, model, processes=_children() - before)
    try:
        rollout.set_weights_version(0)
        return [
            f"{name}: {why}" for name, check in CHECKS.items() if (why := _reason(check, bench))
        ]
    finally:
        engine.close()


def _reason(check: Callable[[EngineBench], None], bench: EngineBench) -> str:
    try:
        check(bench)
    except (ContractError, EngineFailure) as error:
        return str(error)
    return ""


def tokens_have_the_models_log_probs(bench: EngineBench) -> None:
    """Check that responses of all sampling rules come from the model, and end where they must."""
    requests = [
        bench.request(0, n=3),
        bench.request(1, n=2, sampling=_FILTERED),
        bench.request(2, sampling=_GREEDY),
    ]
    finished = bench.generate(requests)
    require(bench.rollout.advance() == [], "there are completions without work")
    for request in requests:
        for sample_id in request.sample_ids:
            _require_exact(bench, request, found=finished[sample_id])
            _require_ending(request.sampling, finished[sample_id])


def draws_depend_on_the_sample_alone(bench: EngineBench) -> None:
    """Check that a sample has the same tokens in another batch, and that other samples differ."""
    if not bench.engine.facts.draws_by_key:
        return
    requests = [bench.request(i, n=2) for i in range(3)]
    expected = bench.generate(requests)
    for request in reversed(requests):
        bench.rollout.add([request])
    found = bench.drain(requests)
    for sample_id, completion in expected.items():
        same = tuple(found[sample_id].token_ids) == tuple(completion.token_ids)
        require(same, f"sample {sample_id} depends on its batch")
    distinct = {tuple(completion.token_ids) for completion in expected.values()}
    require(len(distinct) > 1, "all samples are alike")


def new_weights_replace_old_ones(bench: EngineBench) -> None:
    """Check that repeated prompts get the new model's log-probs at once."""
    for seed in range(2):
        bench.use_new_weights(seed)
        requests = [bench.request(i, n=2) for i in range(3)]
        finished = bench.generate(requests)
        for request in requests:
            for sample_id in request.sample_ids:
                completion = finished[sample_id]
                require(
                    completion.version_runs == ((bench.version, len(completion.token_ids)),),
                    f"version {bench.version} is tagged {completion.version_runs}",
                )
                _require_exact(bench, request, found=completion)


def each_token_has_its_version(bench: EngineBench) -> None:
    """Check that each token has the log-prob of its version when weights change in a sequence."""
    facts = bench.engine.facts
    long = SamplingParams(1.0, 1.0, -1, max_new_tokens=40, ignore_eos=True)
    request = bench.request(0, n=2, sampling=long)
    first, old = bench.version, bench.weights()
    bench.rollout.add([request])
    early = bench.rollout.advance(2)
    bench.use_new_weights(seed=5)
    finished = bench.drain([request], early)
    new = bench.weights()
    for sample_id in request.sample_ids:
        completion = finished[sample_id]
        versions = [version for version, _ in completion.version_runs]
        if not facts.stops_within_sequences:
            require(len(versions) == 1, f"versions {versions} in a sequence")
            continue
        require(versions == [first, bench.version], f"versions {versions} in a sequence")
        num_old = completion.version_runs[0][1]
        _load(bench.model, old)
        expected = bench.log_probs(request, completion)[:num_old]
        _load(bench.model, new)
        if not facts.keeps_cache:
            expected = torch.cat((expected, bench.log_probs(request, completion)[num_old:]))
        _require_close(expected, completion.log_probs[: len(expected)], what="across versions")


def work_beyond_the_capacity_waits(bench: EngineBench) -> None:
    """Check that the declared rows are the configured ones, and that more work finishes too."""
    capacity = bench.engine.capacity
    require(capacity.num_rows in (None, _MAX_ROWS), f"num_rows={capacity.num_rows}")
    if capacity.cache_tokens is not None:
        require(capacity.cache_tokens >= 128, f"cache_tokens={capacity.cache_tokens}")
    requests = [bench.request(i % 3, n=3) for i in range(4 * _MAX_ROWS // 3)]
    bench.rollout.add(requests)
    bench.rollout.settle()
    bench.drain(requests)


def counters_grow(bench: EngineBench) -> None:
    """Check that no counter ever falls."""
    before = dict(bench.rollout.metrics())
    bench.generate([bench.request(0)])
    after = bench.rollout.metrics()
    require(before.keys() <= after.keys(), "a counter disappeared")
    for name, value in before.items():
        require(after[name] >= value, f"{name} fell from {value} to {after[name]}")


def a_sleeping_engine_wakes_up(bench: EngineBench) -> None:
    """Check that an idle engine sleeps, and generates as before once it has weights again."""
    request = bench.request(0, n=2)
    bench.rollout.add([request])
    require(not bench.engine.sleep(), "an engine with work fell asleep")
    expected = bench.drain([request])
    require(bench.engine.sleep() and bench.engine.sleep(), "an idle engine does not sleep")
    bench.engine.wake()
    bench.version += 1
    require(bench.rollout.set_weights_version(bench.version), "a lone engine was not ready")
    for sample_id, completion in bench.generate([request]).items():
        _require_exact(bench, request, found=completion)
        if bench.engine.facts.draws_by_key:
            same = tuple(completion.token_ids) == tuple(expected[sample_id].token_ids)
            require(same, "sleep changed a sample")


def weights_come_whole_or_not_at_all(bench: EngineBench) -> None:
    """Check that a sink names whole tensors, and rejects a version that lacks one."""
    sink = bench.engine.sink()
    require((sink is None) == bench.engine.facts.shares_weights, "facts and sink disagree")
    if sink is None:
        return
    manifest = sink.manifest()
    for spec in manifest:
        require(spec.size == spec.shape and not any(spec.offset), f"{spec.name} is not whole")
    bench.rollout.settle()
    sink.begin(bench.version + 1)
    for spec in manifest[1:]:
        sink.take(spec.name, torch.zeros(spec.shape))
    try:
        sink.end()
    except EngineFailure as failure:
        require(manifest[0].name in str(failure), f"the error does not name the tensor: {failure}")
        return
    raise ContractError("a version without a tensor was taken")


def a_dead_process_is_one_error(bench: EngineBench) -> None:
    """Check that the death of the engine's process is one error, and that no process is left."""
    for pid in bench.processes:
        os.kill(pid, signal.SIGKILL)
    if bench.processes:
        start = time.monotonic()
        try:
            bench.generate([bench.request(0)])
        except EngineFailure as failure:
            require("\n" not in str(failure), "the error has several lines")
        else:
            raise ContractError("an engine continued without its process")
        require(time.monotonic() - start < _FAILURE_S, "the death was noticed late")
    bench.engine.close()
    bench.engine.close()
    left = bench.processes & _children()
    require(not left, f"processes {sorted(left)} are left")


def _require_exact(bench: EngineBench, request: GenerationRequest, *, found: Completion) -> None:
    _require_close(
        bench.log_probs(request, found), found.log_probs, what=f"sample {found.sample_id}"
    )


def _require_close(expected: Tensor, found: Sequence[float], *, what: str) -> None:
    require(len(found) == len(expected), f"{what}: {len(found)} log-probs for {len(expected)}")
    error = float((torch.tensor(found) - expected).abs().max())
    require(error <= LOG_PROB_ERROR, f"{what}: log-probs differ by {error:.1e} from the trainer's")


def _require_ending(sampling: SamplingParams, completion: Completion) -> None:
    ends = [i for i, token in enumerate(completion.token_ids) if token in _EOS]
    stops = bool(ends) and not sampling.ignore_eos
    length = ends[0] + 1 if stops else sampling.max_new_tokens
    reason = FinishReason.STOP if stops else FinishReason.LENGTH
    found = (len(completion.token_ids), completion.finish_reason)
    require(found == (length, reason), f"a response ended as {found}, not as {(length, reason)}")


def _load(model: LanguageModel, weights: Weights) -> None:
    with torch.no_grad():
        for weight, values in zip(model.module.parameters(), weights, strict=True):
            weight.copy_(values)


def _children() -> frozenset[int]:
    """Return the living child processes of this process (Linux)."""
    tasks = Path("/proc/self/task").glob("*/children")
    pids = frozenset(int(pid) for file in tasks for pid in file.read_text().split())
    return frozenset(pid for pid in pids if not _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


CHECKS: dict[str, Callable[[EngineBench], None]] = {
    "tokens_have_the_models_log_probs": tokens_have_the_models_log_probs,
    "draws_depend_on_the_sample_alone": draws_depend_on_the_sample_alone,
    "new_weights_replace_old_ones": new_weights_replace_old_ones,
    "each_token_has_its_version": each_token_has_its_version,
    "work_beyond_the_capacity_waits": work_beyond_the_capacity_waits,
    "counters_grow": counters_grow,
    "a_sleeping_engine_wakes_up": a_sleeping_engine_wakes_up,
    "weights_come_whole_or_not_at_all": weights_come_whole_or_not_at_all,
    "a_dead_process_is_one_error": a_dead_process_is_one_error,
}
"""All checks in order. The last two leave the engine unusable."""
