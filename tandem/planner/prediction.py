# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a training step with another split of the devices.

The pipeline of the run is simulated with a small batch. Each task takes the seconds that
``TaskTimes`` has for its number of devices. The lengths of the small batch are quantiles of the
measured ones and include the longest. Rewards and validations are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tandem.config.schema.run import RunConfig
from tandem.metrics.decode_pace import DecodePace
from tandem.planner.search import Groups, Split
from tandem.planner.simulation import (
    REFERENCE,
    ROLLOUT,
    SCORER,
    TRAINER,
    SimulatedSetup,
    SimulatedTimes,
    simulate,
    simulated_config,
)
from tandem.planner.task_times import SYNC, TaskTimes

_NUM_PROMPTS = 8
_NUM_SAMPLES = 8
_BATCH = _NUM_PROMPTS * _NUM_SAMPLES
_NUM_WARMUP_STEPS = 3
_NUM_STEPS = 8
_DECODE_STEPS = 1024
"""The number of decode steps of a mean response."""


def predictor(config: RunConfig, times: TaskTimes, *, groups: Groups) -> Callable[[Split], float]:
    """Return the ``predict`` of ``search.suggest`` for runs like that of ``config``."""

    def predict(split: Split) -> float:
        return predict_step(config, times, groups=groups, split=split)

    return predict


def predict_step(config: RunConfig, times: TaskTimes, *, groups: Groups, split: Split) -> float:
    """Return the mean seconds of a training step, without the first and the last ones."""
    max_lag = math.ceil(split.lag)
    warmup = _NUM_WARMUP_STEPS + max_lag
    last = warmup + _NUM_STEPS
    num_steps = last + max_lag
    small = simulated_config(
        num_prompts=_NUM_PROMPTS,
        num_samples=_NUM_SAMPLES,
        lag=split.lag,
        num_steps=num_steps,
        further=_carried_over(config),
    )
    num_updates = small.optimizer_steps_per_step
    seconds = _task_seconds(times, groups, split=split, num_updates=num_updates)
    num_engines = _num_engines(groups, split)
    run = simulate(
        small,
        _simulated_times(config, times, seconds=seconds, num_engines=num_engines),
        setup=SimulatedSetup(
            groups,
            num_rows=_NUM_PROMPTS * (num_steps + 1),
            num_engine_rows=_num_rows(config, num_engines),
            stages_weights=config.actor_rollout_ref.rollout.enable_param_async,
        ),
    )
    return run.step_seconds(after=warmup, through=last)


def _num_engines(groups: Groups, split: Split) -> int:
    pairs = zip(groups, split.devices, strict=True)
    return next(count for group, count in pairs if ROLLOUT in group)


def _num_rows(config: RunConfig, num_engines: int) -> int:
    """Return the rows of all engines, scaled down as the batch is."""
    num_rows = config.actor_rollout_ref.rollout.max_num_seqs * num_engines
    return max(1, _BATCH * num_rows // config.sequences_per_step)


def _carried_over(config: RunConfig) -> list[str]:
    """Return overrides with the settings of ``config`` that decide the order of tasks."""
    bypass = config.algorithm.rollout_correction.bypass_mode
    partial = config.actor_rollout_ref.rollout.partial_rollout
    num_mini_batches = 2 if config.needs_old_log_probs else 1
    return [
        f"actor_rollout_ref.actor.use_kl_loss={config.needs_reference}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={_NUM_PROMPTS // num_mini_batches}",
        f"algorithm.rollout_correction.bypass_mode={bypass}",
        f"actor_rollout_ref.rollout.partial_rollout={partial}",
        f"trainer.deterministic_async={config.trainer.deterministic_async}",
    ]


def _task_seconds(
    times: TaskTimes, groups: Groups, *, split: Split, num_updates: int
) -> dict[str, float]:
    devices = {
        task: count for group, count in zip(groups, split.devices, strict=True) for task in group
    }
    seconds = {
        task: times.seconds(task, devices.get(task, 1))
        for task in (TRAINER, SCORER, REFERENCE, ROLLOUT, SYNC)
    }
    seconds[TRAINER] /= num_updates
    return seconds


def _simulated_times(
    config: RunConfig, times: TaskTimes, *, seconds: Mapping[str, float], num_engines: int
) -> SimulatedTimes:
    """Return the times of the small batch.

    With ``times.decoding``, a decode step depends on the number of concurrent sequences. Without
    it, a batch takes the same time whatever else is generated.
    """
    lengths = quantiles(times.relative_lengths, _BATCH, longest=times.longest)
    num_slots = _num_rows(config, num_engines)
    slowdown = _constant
    if times.decoding is None:
        num_slots = min(num_slots, _BATCH)
        mean = seconds[ROLLOUT] * times.rows_share
        decode_step = mean / _DECODE_STEPS
    else:
        mean = times.decoding.mean_tokens
        decode_step = max(mean / _DECODE_STEPS, 1.0)
        share = config.sequences_per_step / _BATCH / num_engines
        slowdown = partial(_step_seconds, times.decoding.pace, share=share)

    def response(uid: int, k: int) -> float:
        # Neighbouring draws get distant lengths, and every batch has all lengths.
        place = (uid % _NUM_PROMPTS) * _NUM_SAMPLES + k
        return mean * lengths[(place * 7) % _BATCH]

    return SimulatedTimes(
        response_s=response,
        task_s=lambda task, _: seconds.get(task, 0.0),
        num_slots=num_slots,
        decode_step_s=decode_step,
        slowdown=slowdown,
    )


def _constant(_: int) -> float:
    return 1.0


def _step_seconds(pace: DecodePace, num_running: int, *, share: float) -> float:
    # Each simulated sequence represents ``share`` sequences of a real engine.
    return pace.step_s(num_running * share)


def quantiles(lengths: Sequence[float], count: int, *, longest: float = 0.0) -> list[float]:
    """Return ``count`` quantiles of ``lengths``, ascending, scaled to the mean 1.

    The last one is not scaled: it is the greatest of ``lengths`` and ``longest``.
    """
    ordered = sorted(lengths)
    if len(ordered) == 1 and longest <= ordered[0]:
        return [1.0] * count
    cuts = [i * len(ordered) / count for i in range(count + 1)]
    means = [
        ordered[min(int((low + high) / 2), len(ordered) - 1)]
        for low, high in zip(cuts, cuts[1:], strict=False)
    ]
    means[-1] = max(ordered[-1], longest)
    scale = (count - means[-1]) / max(sum(means[:-1]), 1e-9)
    return [value * scale for value in means[:-1]] + [means[-1]] if scale > 0 else means
