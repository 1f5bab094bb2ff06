# SPDX-License-Identifier: Apache-2.0
"""The seconds of a training step with another split of the devices: the pipeline of the run, with a
small batch, under the virtual clock, each task as long as ``TaskTimes`` says for its devices.

The small batch has the lengths of the large one: its responses are evenly chosen among them, the
longest always present. Reward and validation are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.config.run import RunConfig
from tandem.metrics.task_times import SYNC, TaskTimes
from tandem.pipeline.planner import Groups, Split
from tandem.pipeline.simulation import (
    REFERENCE,
    ROLLOUT,
    SCORER,
    TRAINER,
    SimulatedTimes,
    Surroundings,
    simulate,
    simulated_config,
)

_NUM_PROMPTS = 8
_NUM_SAMPLES = 2
_BATCH = _NUM_PROMPTS * _NUM_SAMPLES
_NUM_WARMUP_STEPS = 3
_NUM_STEPS = 8
_DECODE_STEPS = 1024
"""Of a mean response."""


def predictor(config: RunConfig, times: TaskTimes, *, groups: Groups) -> Callable[[Split], float]:
    """What ``planner.suggest`` asks; everything but devices and lag is as in ``config``."""

    def predict(split: Split) -> float:
        return predict_step(config, times, groups=groups, split=split)

    return predict


def predict_step(config: RunConfig, times: TaskTimes, *, groups: Groups, split: Split) -> float:
    """Seconds of a training step in the long run."""
    warmup = _NUM_WARMUP_STEPS + split.lag
    num_steps = warmup + _NUM_STEPS
    small = simulated_config(
        num_prompts=_NUM_PROMPTS,
        num_samples=_NUM_SAMPLES,
        lag=split.lag,
        num_steps=num_steps,
        further=_carried_over(config),
    )
    run = simulate(
        small,
        _simulated_times(times, groups, split=split, num_updates=small.optimizer_steps_per_step),
        around=Surroundings(
            groups,
            num_rows=_NUM_PROMPTS * (num_steps + 1),
            num_engine_rows=_rows(config, groups, split=split),
            stages_weights=config.actor_rollout_ref.rollout.enable_param_async,
        ),
    )
    return run.step_seconds(after=warmup)


def _rows(config: RunConfig, groups: Groups, *, split: Split) -> int:
    """Of all engines, as a part of a batch like that of the run."""
    pairs = zip(groups, split.devices, strict=True)
    num_engines = next(count for group, count in pairs if ROLLOUT in group)
    rollout = config.actor_rollout_ref.rollout
    batch = config.data.train_batch_size * rollout.n
    return max(1, _BATCH * rollout.max_num_seqs * num_engines // batch)


def _carried_over(config: RunConfig) -> list[str]:
    """What of a configuration decides on the order of tasks."""
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


def _simulated_times(
    times: TaskTimes, groups: Groups, *, split: Split, num_updates: int
) -> SimulatedTimes:
    devices = {
        task: count for group, count in zip(groups, split.devices, strict=True) for task in group
    }
    seconds = {
        task: times.seconds(task, devices.get(task, 1))
        for task in (TRAINER, SCORER, REFERENCE, ROLLOUT, SYNC)
    }
    seconds[TRAINER] /= num_updates
    lengths = strata(times.relative_lengths, _BATCH)
    mean_s = seconds[ROLLOUT]

    def response_s(uid: int, k: int) -> float:
        # Neighbouring draws get distant lengths, and every batch all of them.
        place = (uid % _NUM_PROMPTS) * _NUM_SAMPLES + k
        return mean_s * lengths[(place * 7) % _BATCH]

    return SimulatedTimes(
        response_s=response_s,
        task_s=lambda task, _: seconds.get(task, 0.0),
        num_slots=_BATCH,
        decode_step_s=mean_s / _DECODE_STEPS,
    )


def strata(lengths: Sequence[float], count: int) -> list[float]:
    """``count`` lengths with mean 1 that stand for all: means of equal shares, but the longest."""
    ordered = sorted(lengths)
    if len(ordered) == 1:
        return [1.0] * count
    cuts = [i * len(ordered) / count for i in range(count + 1)]
    means = [
        ordered[min(int((low + high) / 2), len(ordered) - 1)]
        for low, high in zip(cuts, cuts[1:], strict=False)
    ]
    means[-1] = ordered[-1]
    scale = (count - means[-1]) / max(sum(means[:-1]), 1e-9)
    return [value * scale for value in means[:-1]] + [means[-1]] if scale > 0 else means
