# SPDX-License-Identifier: Apache-2.0
"""Checks of tandem's computations on a platform, in fp32, against the host's.

They cover log-probs, training over several devices, resuming and generation, with a random model.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, distributed

from tandem.algorithms.policy_loss import PolicyLoss
from tandem.config.derived.pools import rank_layout
from tandem.config.schema.actor import ActorConfig
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.rollout import RolloutConfig
from tandem.data.packing import TrainSequence, pack_microbatches, plan_microbatches
from tandem.engines.fsdp import FsdpEngine
from tandem.engines.fsdp_model import FsdpSpec, open_fsdp_model
from tandem.engines.offload import OffloadedParameters
from tandem.engines.shards import view_of
from tandem.engines.single import SingleDeviceEngine
from tandem.engines.steps import score
from tandem.models.folder import check_folder, open_model
from tandem.models.operators import operators_for
from tandem.platforms.record import CPU, Platform
from tandem.rollout.factory import EngineSpec, build_engine
from tandem.testing.contracts.check import (
    EXACT,
    UNIT_ROUNDOFF,
    Bench,
    Check,
    Measured,
    bounded,
    error_of,
    mean_error_of,
    require,
    require_equal,
)
from tandem.types import (
    Completion,
    GenerationRequest,
    LossColumns,
    LossScale,
    PackedBatch,
    SamplingParams,
    SliceSpec,
)

_SEED = 7
_VOCAB = 96
_CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": _VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_OPTIM = OptimConfig(lr=2e-4, clip_grad=0.5)
_LOSS = PolicyLoss(
    loss_mode="vanilla",
    settings=ActorConfig(
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        loss_agg_mode="seq-mean-token-mean",
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.05,
    ),
)
_TEMPERATURE = 0.9
_NUM_STEPS = 3
_WEIGHTS_PER_UPDATE = 40
"""The mean magnitude of the weights over that of their updates by all steps: 0.018 over 4.7e-4."""
_FUSED_ERROR = 2e-3
"""The bound for kernels that multiply fp32 in TF32: four times its unit roundoff of 2**-11."""


def log_probs_match(bench: Bench) -> Measured:
    """Compare the log-probs of a packed batch whose responses share their prompts."""
    batch = _batches(max_sequences=None)[0]
    found, expected = (
        score(
            open_model(
                str(_model(bench)),
                dtype=torch.float32,
                device=device,
                random_seed=_SEED,
                operators=operators_for(platform),
            ),
            batch,
            temperature=_TEMPERATURE,
        ).score_R
        for device, platform in ((bench.device, bench.here.platform), ("cpu", CPU))
    )
    return bounded("log_prob", error_of(found, expected), limit=_limit(bench.here.platform))


def training_matches(bench: Bench) -> Measured:
    """Compare steps of policy optimization over all devices of the world with the host's.

    Every rank must have the metrics, gradient norm and weights of a single-process run.
    """
    return compare_training(bench, lr=_OPTIM.lr, num_steps=_NUM_STEPS, dealt_to=bench.here.rank)


def compare_training(bench: Bench, *, lr: float, num_steps: int, dealt_to: int) -> Measured:
    """Train with these settings on the world's devices and with the suite's own on the host.

    Args:
        dealt_to: the rank whose micro-batches this process trains on.

    Raises:
        ContractError: metrics or updates differ by more than rounding explains.
    """
    optim = _OPTIM.model_copy(update={"lr": lr})
    engine = _engine(bench, optim)
    mine, rounds = _deal(dealt_to, bench.here.size)
    single, of_host = _host_engine(bench)
    before = _flat(of_host)
    errors = []
    for step in range(_NUM_STEPS):
        expected = single.update(
            _batches(max_sequences=2), _LOSS, scale=_scale(), temperature=_TEMPERATURE
        )
        single.advance_schedule()
        if step >= num_steps:
            continue
        report = engine.update(
            mine, _LOSS, scale=_scale(), temperature=_TEMPERATURE, num_rounds=rounds
        )
        engine.advance_schedule()
        require(not report.skipped, "a step was not finite")
        names = sorted(expected.metrics)
        found = torch.tensor([*(report.metrics[name] for name in names), report.grad_norm])
        wanted = torch.tensor([*(expected.metrics[name] for name in names), expected.grad_norm])
        errors.append(error_of(found, wanted))
    limit = _limit(bench.here.platform)
    error = mean_error_of(_flat(_whole(engine)) - before, _flat(of_host) - before)
    return {
        **bounded("metrics", max(errors), limit=limit),
        # Gradients go through three times as many accumulations as log-probs: sqrt(3) < 2.
        **bounded("update", error, limit=update_limit(2 * limit)),
    }


def update_limit(gradient_error: float) -> float:
    """Return the bound on the mean error of the weights' updates, relative to the mean update.

    AdamW divides a gradient by its own magnitude. An element whose gradient is small beside the
    gradients' scale s moves by up to two learning rates in either direction when its gradient is
    off by e s, so the *largest* difference between two processors has no useful bound. The mean
    has one: for gradients with a density of at most 1 / (2 s) at each value,

        mean(min(2, e s / |g|)) <= 2 / (2 s) * (integral_0^(e s / 2) 2 dg
                                                + integral_(e s / 2)^s e s / g dg)
                                 = e (1 + ln(2 / e))    in learning rates.

    The mean update is about one learning rate per step. Both sides also round the stored weights
    once per step.

    Args:
        gradient_error: e, the error of the gradients relative to their scale.
    """
    stored = 2 * UNIT_ROUNDOFF * _NUM_STEPS * _WEIGHTS_PER_UPDATE
    return gradient_error * (1 + math.log(2 / gradient_error)) + stored


def training_resumes(bench: Bench) -> Measured:
    """Check that a checkpoint restores weights bit by bit, and that the next step is the same."""
    mine, rounds = _deal(bench.here.rank, bench.here.size)
    folder = bench.folder / "checkpoint"
    folder.mkdir(exist_ok=True)
    distributed.barrier()
    engine = _engine(bench)
    engine.update(mine, _LOSS, scale=_scale(), temperature=_TEMPERATURE, num_rounds=rounds)
    engine.save(folder)
    saved = _parts(engine)
    resumed = _engine(bench)
    resumed.load(folder)
    for (_, before), (_, after) in zip(saved, _parts(resumed), strict=True):
        require(torch.equal(before, after), "a weight changed by saving and loading")
    for one in (engine, resumed):
        one.update(mine, _LOSS, scale=_scale(), temperature=_TEMPERATURE, num_rounds=rounds)
    found, expected = (
        torch.cat([part.flatten() for _, part in _parts(one)]) for one in (resumed, engine)
    )
    return bounded("resumed_step", error_of(found, expected))


def weights_are_offloaded(bench: Bench) -> Measured:
    """Check that offloaded weights keep their values and stay the same objects."""
    net = torch.nn.Linear(64, 64).to(bench.device)
    before = [weight.detach().cpu().clone() for weight in net.parameters()]
    offloaded = OffloadedParameters(net.parameters())
    for _ in range(2):
        require(net.weight.device.type == "cpu", f"offloaded weights are on {net.weight.device}")
        with offloaded.on_device():
            require(net.weight.device == bench.device, f"weights are on {net.weight.device}")
            for weight, expected in zip(net.parameters(), before, strict=True):
                require_equal(weight, expected, what="a weight that was offloaded")
    with offloaded.on_device():
        net(torch.ones(1, 64, device=bench.device)).sum().backward()
        require(net.weight.grad is not None, "weights that were offloaded have no gradient")
        net.zero_grad()
    return {}


def generation_matches(bench: Bench) -> Measured:
    """Compare greedy continuations with the host's, token by token, and their log-probs.

    If two tokens are equally probable to the accuracy of the kernels, either may follow.
    """
    found, expected = (
        _generate(bench, device, platform=platform)
        for device, platform in ((bench.device, bench.here.platform), ("cpu", CPU))
    )
    errors = []
    for ours, theirs in zip(found, expected, strict=True):
        same = [a == b for a, b in zip(ours.token_ids, theirs.token_ids, strict=False)]
        length = same.index(False) + 1 if False in same else len(same)
        require(False in same or len(ours.token_ids) == len(theirs.token_ids), "the lengths differ")
        both = (torch.tensor(one.log_probs[:length]) for one in (ours, theirs))
        errors.append(error_of(*both))
    return bounded("generated_log_prob", max(errors), limit=_limit(bench.here.platform))


def _limit(platform: Platform) -> float:
    return EXACT if platform.kernels == "torch" else _FUSED_ERROR


def _model(bench: Bench) -> Path:
    """Write a configuration without weights into a folder of this process."""
    folder = bench.folder / f"model-{bench.here.rank}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


def _sequences() -> list[TrainSequence]:
    numbers = random.Random(2)

    def draw(shortest: int, longest: int) -> tuple[int, ...]:
        return tuple(
            numbers.randrange(3, _VOCAB) for _ in range(numbers.randint(shortest, longest))
        )

    prompts = [draw(2, 12) for _ in range(4)]
    return [TrainSequence(i // 2, prompts[i // 2], draw(1, 9)) for i in range(8)]


def _scale() -> LossScale:
    sequences = _sequences()
    return LossScale(sum(one.num_loss_tokens for one in sequences), len(sequences))


def _batches(*, max_sequences: int | None) -> list[PackedBatch]:
    sequences, generator = _sequences(), torch.Generator().manual_seed(1)
    num_tokens = _scale().num_tokens
    columns = LossColumns(
        advantages_R=torch.randn(num_tokens, generator=generator),
        old_logp_R=-4 + 0.1 * torch.randn(num_tokens, generator=generator),
        ref_logp_R=-4 + 0.1 * torch.randn(num_tokens, generator=generator),
    )
    plan = plan_microbatches(sequences, max_sequences=max_sequences, max_tokens=None)
    return pack_microbatches(sequences, plan, columns=columns)


def _deal(rank: int, size: int) -> tuple[list[PackedBatch], int]:
    """Return the micro-batches of a rank and the number of rounds."""
    batches = _batches(max_sequences=2)
    return batches[rank::size], -(-len(batches) // size)


def _engine(bench: Bench, optim: OptimConfig = _OPTIM) -> FsdpEngine:
    config = FsdpConfig()
    spec = FsdpSpec(
        config,
        rank_layout(config, bench.here.size),
        rank=bench.here.rank,
        device=bench.device,
        stored=torch.float32,
        compute=torch.float32,
    )
    model = open_fsdp_model(
        check_folder(str(_model(bench)), load_weight=False),
        spec,
        random_seed=_SEED,
        operators=operators_for(bench.here.platform),
    )
    return FsdpEngine(model, optim, total_training_steps=10)


def _host_engine(bench: Bench) -> tuple[SingleDeviceEngine, dict[str, Tensor]]:
    """Return an engine on the host, and its live weights."""
    stored = open_model(str(_model(bench)), dtype=torch.float32, device="cpu", random_seed=_SEED)
    engine = SingleDeviceEngine(stored, _OPTIM, total_training_steps=10)
    return engine, {name: weight.detach() for name, weight in stored.module.named_parameters()}


def _parts(engine: FsdpEngine) -> list[tuple[SliceSpec, Tensor]]:
    return [(held.spec, held.tensor.detach().cpu().clone()) for held in engine.held_slices()]


def _whole(engine: FsdpEngine) -> dict[str, Tensor]:
    gathered: list[Sequence[tuple[SliceSpec, Tensor]]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(gathered, _parts(engine))
    wholes: dict[str, Tensor] = {}
    for spec, tensor in (part for parts in gathered for part in parts):
        whole = wholes.setdefault(spec.name, torch.full(spec.shape, torch.nan, dtype=spec.dtype))
        view_of(whole, spec).copy_(tensor)
    return wholes


def _flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def _generate(bench: Bench, device: torch.device | str, *, platform: Platform) -> list[Completion]:
    model = open_model(
        str(_model(bench)),
        dtype=torch.float32,
        device=device,
        random_seed=_SEED,
        operators=operators_for(platform),
    )
    config = RolloutConfig(max_num_seqs=4, seed=1)
    engine = build_engine(EngineSpec(model, _model(bench), config, (0,), platform))
    greedy = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=8)
    prompts = ((5, 6, 7, 8), (11, 12), (20, 21, 22, 23, 24, 25, 26))
    engine.add([GenerationRequest((i,), prompt, greedy) for i, prompt in enumerate(prompts)])
    done: list[Completion] = []
    while len(done) < len(prompts):
        done += engine.advance()
    return sorted(done, key=lambda completion: completion.sample_id)


CHECKS = (
    Check("model/log_probs", log_probs_match),
    Check("model/training", training_matches),
    Check("model/resuming", training_resumes),
    Check("model/resting", weights_are_offloaded),
    Check("model/generation", generation_matches),
)
