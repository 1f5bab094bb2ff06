# SPDX-License-Identifier: Apache-2.0
"""The seconds of a training step with another split of the devices: the pipeline of the run, with a
small batch, under the virtual clock, each task as long as ``TaskTimes`` says for its devices.

The small batch has the lengths of the large one: its responses are evenly chosen among them, the
longest always present. Reward and validation are left out.
"""

from __future__ import annotations

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
    SimulatedTimes,
    Surroundings,
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
"""Of a mean response."""


def predictor(config: RunConfig, times: TaskTimes, *, groups: Groups) -> Callable[[Split], float]:
    """What ``planner.suggest`` asks; everything but devices and lag is as in ``config``."""

    def predict(split: Split) -> float:
        return predict_step(config, times, groups=groups, split=split)

    return predict


def predict_step(config: RunConfig, times: TaskTimes, *, groups: Groups, split: Split) -> float:
    """Seconds of a training step in the long run."""
    warmup = _NUM_WARMUP_STEPS + split.lag
    last = warmup + _NUM_STEPS
    num_steps = last + split.lag
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
        around=Surroundings(
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
    """Of all engines, as a part of a batch like that of the run."""
    num_rows = config.actor_rollout_ref.rollout.max_num_seqs * num_engines
    return max(1, _BATCH * num_rows // config.sequences_per_step)


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


def _task_seconds(
    times: TaskTimes, groups: Groups, *, split: Split, num_updates: int
) -> dict[str, float]:
    """Of one call of each task."""
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
    """Of a pool that takes as long for a step as there are sequences in it, if that is known; else
    as long for a batch, whatever else is under way.
    """
    lengths = strata(times.relative_lengths, _BATCH, longest=times.longest)
    num_slots = _num_rows(config, num_engines)
    crowding = _alike
    if times.decoding is None:
        num_slots = min(num_slots, _BATCH)
        mean = seconds[ROLLOUT] * times.rows_share
        decode_step = mean / _DECODE_STEPS
    else:
        mean = times.decoding.mean_tokens
        decode_step = max(mean / _DECODE_STEPS, 1.0)
        share = config.sequences_per_step / _BATCH / num_engines
        crowding = partial(_step_seconds, times.decoding.pace, share=share)

    def response(uid: int, k: int) -> float:
        # Neighbouring draws get distant lengths, and every batch all of them.
        place = (uid % _NUM_PROMPTS) * _NUM_SAMPLES + k
        return mean * lengths[(place * 7) % _BATCH]

    return SimulatedTimes(
        response_s=response,
        task_s=lambda task, _: seconds.get(task, 0.0),
        num_slots=num_slots,
        decode_step_s=decode_step,
        crowding=crowding,
    )


def _alike(_: int) -> float:
    return 1.0


def _step_seconds(pace: DecodePace, num_running: int, *, share: float) -> float:
    """``share``: sequences of one engine that each of those under way stands for."""
    return pace.step_s(num_running * share)


def strata(lengths: Sequence[float], count: int, *, longest: float = 0.0) -> list[float]:
    """``count`` lengths with mean 1 that stand for all: means of equal shares, but the longest one,
    which is ``longest`` if none of ``lengths`` is.
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
