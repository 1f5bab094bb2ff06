# SPDX-License-Identifier: Apache-2.0
"""The cost of a training step beside its engines: the real pipeline, with instant engines.

    python benchmarks/orchestration.py [--prompts 128] [--samples 16] [--prompt 256]
    [--response 512] [--budget 24576] [--devices 2] [--steps 7] [--clock cpu] [--output FILE]

All but the engines is that of a run; all responses end at the same moment, which is the worst
case. ``step_s`` are the sections of a step (medians; of ``gen`` only what making up random tokens
takes, which ``sum`` leaves out); ``other`` is what no section names. ``parts_s`` are the pieces
alone, and the way of completions and micro-batches to another process and back. ``peak_gib`` is the
memory of the driver. ``--clock cpu`` counts seconds of processor of the driver.
"""

import argparse
import asyncio
import json
import pickle
import resource
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo_step import PHASES, REWARD, write_tokenizer
from measure import describe, tell
from processes import children_end
from tokenizers import Tokenizer, decoders

from tandem.api import Engines
from tandem.checkpoint.store import CheckpointStore
from tandem.config.derived.schedule import schedule_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.data.ledger import open_source
from tandem.data.packing import pack_microbatches, plan_microbatches
from tandem.data.prompts import PromptSource
from tandem.data.rendering import PromptEntry
from tandem.data.tokenizer import TextCodec, load_codec
from tandem.data.wire import SentBatches
from tandem.driver.rewards import open_rewards
from tandem.driver.train import MAX_ROLLOUTS_RECORDED_PER_STEP
from tandem.metrics.activity import Activity
from tandem.metrics.jsonl import METRICS_FILE
from tandem.metrics.records import RolloutRecorder
from tandem.metrics.sinks import SinkSettings, open_sinks
from tandem.metrics.throughput import ComputeFacts
from tandem.pipeline.batch import as_floats, lay_out
from tandem.pipeline.context import Rewards, RunContext
from tandem.pipeline.experience import assign_credit
from tandem.pipeline.loop import Pipeline, initial_kl_controller
from tandem.pipeline.step_metrics import batch_metrics
from tandem.planner.engines import TRAINER, SimulatedPolicy, SimulatedTimes
from tandem.runtime.inprocess import InProcessRuntime
from tandem.types import Completion, FinishReason, GenerationRequest, Group

VOCABULARY = 151936
FIRST_WORD = 258
"""Ids below are the tokenizer's special ones."""
NUM_WARMUP = 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
NO_TIME = SimulatedTimes(lambda uid, k: 0.0, lambda task, number: 0.0, num_slots=1)


class InstantRollout:
    """Implements ``api.RolloutEngine``: everything asked for is complete at once."""

    def __init__(self) -> None:
        self._complete: list[Completion] = []
        self._version = -1
        self._random = np.random.default_rng(0)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Draw all responses."""
        for request in requests:
            shape = (len(request.sample_ids), request.sampling.max_new_tokens)
            tokens = self._random.integers(FIRST_WORD, VOCABULARY, shape)
            log_probs = -self._random.random(shape, dtype=np.float32)
            self._complete += [
                Completion(
                    sample_id,
                    array("i", tokens[k].tolist()),
                    array("f", log_probs[k].tolist()),
                    FinishReason.LENGTH,
                    self._version,
                )
                for k, sample_id in enumerate(request.sample_ids)
            ]

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """All of them."""
        complete, self._complete = self._complete, []
        return complete

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Nothing is kept."""

    def settle(self) -> None:
        """Nothing is under way."""

    def metrics(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def set_weights_version(self, version: int) -> bool:
        """In use at once."""
        self._version = version
        return True


class InstantTrainer(SimulatedPolicy):
    """Steps at once; ``devices`` compute at the same time."""

    def __init__(self, devices: int) -> None:
        super().__init__(NO_TIME, (), task=TRAINER)
        self.data_parallel_size = devices


@dataclass
class Keeping:
    """Implements ``parts.Recorder``: passes on, and keeps the last step's groups."""

    recorder: RolloutRecorder
    groups: Sequence[Group] = ()

    def write(self, step: int, groups: Sequence[Group], *, advantages: Sequence[float]) -> None:
        """See ``RolloutRecorder.write``."""
        self.groups = groups
        self.recorder.write(step, groups, advantages=advantages)

    def close(self) -> None:
        """See ``RolloutRecorder.close``."""
        self.recorder.close()


def make_byte_level(path: Path) -> None:
    """Let a tokenizer decode as those of Qwen, Llama 3 and GPT do."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def make_config(options: argparse.Namespace, folder: Path) -> RunConfig:
    """GRPO without KL, strictly on-policy."""
    actor = "actor_rollout_ref.actor"
    keys = (
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={options.budget}",
        f"{actor}.ppo_mini_batch_size={options.prompts}",
        f"{actor}.use_kl_loss=False",
        f"actor_rollout_ref.rollout.n={options.samples}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "data.val_files=[]",
        f"data.train_batch_size={options.prompts}",
        f"data.max_prompt_length={options.prompt}",
        f"data.max_response_length={options.response}",
        f"trainer.total_training_steps={NUM_WARMUP + options.steps}",
        f"trainer.default_local_dir={folder / 'run'}",
        "trainer.save_freq=0",
        "trainer.logger=[]",
        *options.keys,
    )
    return load_config(RunConfig, list(keys)).config


def make_source(
    options: argparse.Namespace, config: RunConfig, *, codec: TextCodec
) -> PromptSource:
    """Random prompts of two batches."""
    rows = 2 * options.prompts
    random = np.random.default_rng(1)
    tokens = random.integers(FIRST_WORD, VOCABULARY, (rows, options.prompt), dtype=np.int32)
    texts = codec.decode(tokens.tolist())
    entries = [PromptEntry(i, "random", "", {}, texts[i], texts[i], tokens[i]) for i in range(rows)]
    return open_source(entries, config.data, total_epochs=NUM_WARMUP + options.steps)


def make_parts(
    options: argparse.Namespace, folder: Path, *, rewards: Rewards, config: RunConfig
) -> RunContext:
    """A run's parts but for its engines."""
    codec = load_codec(str(folder / "model"))
    run_folder = folder / "run"
    recorder = RolloutRecorder(
        run_folder,
        max_per_step=MAX_ROLLOUTS_RECORDED_PER_STEP,
        token_texts=lambda ids: codec.decode([[token] for token in ids], skip_special=False),
        keep_through_step=-1,
    )
    total_steps = NUM_WARMUP + options.steps
    trainer, activity = InstantTrainer(options.devices), Activity()
    return RunContext(
        config=config,
        schedule=schedule_run(config, total_steps * options.prompts),
        runtime=InProcessRuntime(),
        engines=Engines(trainer, InstantRollout(), None, trainer),
        source=make_source(options, config, codec=codec),
        validation_prompts=list,
        codec=codec,
        rewards=rewards,
        store=CheckpointStore(run_folder, max_to_keep=None),
        sinks=open_sinks(
            SinkSettings(
                trainer=config.trainer,
                run_folder=run_folder,
                total_steps=total_steps,
                keep_through_step=-1,
                environment={},
                stream=sys.stdout,
                activity=activity,
            )
        ),
        recorder=Keeping(recorder),
        facts=ComputeFacts(None, "", num_devices=1, num_training_devices=1),
        preferred_tokens=None,
        clock=CLOCKS[options.clock],
        allocated_bytes=lambda: 0,
        reserved_bytes=lambda: 0,
        activity=activity,
    )


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole measurement."""
    config = make_config(options, folder)
    async with open_rewards(config) as rewards:
        parts = make_parts(options, folder, rewards=rewards, config=config)
        await Pipeline(parts).run()
        await parts.runtime.close()
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows = (folder / "run" / METRICS_FILE).read_text().splitlines()
    records = [json.loads(row) for row in rows][NUM_WARMUP:]
    parts_s = {} if options.no_parts else pieces(options, parts)
    return {"step_s": sections(records), "peak_gib": peak_gib, "parts_s": parts_s}


def sections(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians of what the steps say of themselves."""
    walls = [r["perf/total_num_tokens"] / r["perf/wall_throughput"] for r in records]
    names = (*PHASES, "lay_out")
    seconds = {name: [r.get(f"timing_s/{name}", 0.0) for r in records] for name in names}
    named = [sum(values) for values in zip(*seconds.values(), strict=True)]
    seconds["other"] = [wall - part for wall, part in zip(walls, named, strict=True)]
    seconds["sum"] = [wall - made_up for wall, made_up in zip(walls, seconds["gen"], strict=True)]
    return {name: statistics.median(values) for name, values in seconds.items()}


def pieces(options: argparse.Namespace, parts: RunContext) -> dict[str, float]:
    """Each piece of a step alone, on the groups of the last one."""
    assert isinstance(parts.recorder, Keeping), "the parts are not those of make_parts"
    config, recorder = parts.config, parts.recorder.recorder
    groups = parts.recorder.groups
    samples = [sample for group in groups for sample in group.samples]
    completions = [drawn for sample in samples for drawn in sample.trajectory.completions]
    controller = initial_kl_controller(config)
    batch = lay_out(groups)
    experience = assign_credit(batch, config=config, controller=controller)
    means = as_floats(batch.mean_tokens(experience.advantages_R))
    plan = plan_microbatches(
        batch.sequences, max_tokens=options.budget, multiple_of=options.devices
    )
    packed = pack_microbatches(batch.sequences, plan, columns=experience.columns)
    steps = iter(range(10**6))
    calls: dict[str, Callable[[], object]] = {
        "decode": lambda: [
            parts.codec.decode([sample.trajectory.response_ids for sample in group.samples])
            for group in groups
        ],
        "lay_out": lambda: lay_out(groups),
        "adv": lambda: assign_credit(batch, config=config, controller=controller),
        "plan": lambda: plan_microbatches(
            batch.sequences, max_tokens=options.budget, multiple_of=options.devices
        ),
        "pack": lambda: pack_microbatches(batch.sequences, plan, columns=experience.columns),
        "metrics": lambda: batch_metrics(parts, experience, kl_coefficient=0.0),
        "record": lambda: recorder.write(next(steps), groups, advantages=means),
        "unpickle_completions": partial(pickle.loads, pickle.dumps(completions, protocol=5)),
        "pickle_microbatches": lambda: [len(pickle.dumps(SentBatches([b]), 5)) for b in packed],
    }
    clock = CLOCKS[options.clock]
    return {name: median_s(call, options.steps, clock=clock) for name, call in calls.items()}


def median_s(function: Callable[[], object], repeats: int, *, clock: Callable[[], float]) -> float:
    """Median seconds of a call."""
    seconds: list[float] = []
    for _ in range(repeats):
        begin = clock()
        function()
        seconds.append(clock() - begin)
    return statistics.median(seconds)


@children_end()
def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens")
    parser.add_argument("--budget", type=int, default=24576, help="tokens of a micro-batch")
    parser.add_argument("--devices", type=int, default=2, help="ranks that the update is dealt to")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--no-parts", action="store_true", help="leave the pieces out")
    parser.add_argument("--output", type=Path)
    parser.add_argument("keys", nargs="*", help="further keys of tandem")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        for part in ("model", "run"):
            (folder / part).mkdir()
        write_tokenizer(folder / "model", VOCABULARY)
        make_byte_level(folder / "model" / "tokenizer.json")
        (folder / "reward.py").write_text(REWARD)
        figures = asyncio.run(run(options, folder))
    settings = {name: getattr(options, name) for name in ("prompts", "samples", "prompt")}
    settings |= {"response": options.response, "budget": options.budget, "keys": options.keys}
    report = {
        "benchmark": "orchestration",
        **describe(),
        "threads": torch.get_num_threads(),
        "devices": options.devices,
        "clock": options.clock,
        "settings": settings,
        **figures,
    }
    tell(report, options.output)


if __name__ == "__main__":
    main()
