# SPDX-License-Identifier: Apache-2.0
"""A whole GRPO step on one accelerator through the product, as a user starts it.

    python benchmarks/grpo_step.py [--model qwen2.5-0.5b] [--workload S] [--budget 24576]
    [--folder FOLDER] [--balanced] [--output FILE] [key=value ...]

Prints one JSON object and a line. Model (random weights), prompts and reward are made in
``--folder`` and reused from there, also by ``peers/``; ``--prepare`` stops at that. Steps are
wall-clock from the end of one to the end of the next, nothing left out; the first two are warm-up.
Of an asynchronous run the last ``trainer.generate_ahead_steps`` steps are not counted either: no
others are generated beside them.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from operator import mul
from pathlib import Path
from typing import Any

import torch
from measure import copy_rate, describe, matmul_rate, tell
from PIL import Image
from processes import children_end, start
from shapes import (
    EOS_ID,
    PAD_ID,
    PEAK_FLOPS,
    PIXELS,
    SHAPES,
    VISION_IDS,
    WORKLOADS,
    Shape,
    Workload,
    decode_steps,
    generation_floor_s,
    plant_balance,
    plant_end,
    random_decoder,
    update_floor_s,
    update_flops,
)
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tandem.models.operators import operators_for
from tandem.models.weights import save_hf_folder
from tandem.platforms.select import select_platform

MODELS = {
    **SHAPES,
    "tiny": Shape(64, 256, 2, 4, 2, 16, 512, True),
    "tiny-vl": Shape(256, 256, 2, 2, 2, 128, 512, True, sees=True),
}
TASKS = {
    **WORKLOADS,
    "tiny": Workload(4, 4, 8, 8),
    "tiny-T": Workload(4, 4, 8, 64, mean_response=16),
    "tiny-V": Workload(4, 4, 8 + 4 + 2, 8, picture=(56, 56)),
}
"""The tiny ones measure nothing: they try the script where there is no accelerator."""

NUM_BATCHES = 16
"""Of prompts in the file; longer runs draw them again."""
NUM_PICTURE_BATCHES = 4
"""Likewise, of prompts with pictures."""

PAD, END = "<pad>", "<end>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ASYNCHRONOUS = ("pipeline/", "training/lag/", "rollout_corr/")
PHASES = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
ENGINE_KEY = "actor_rollout_ref.rollout.name"
REWARD = '''"""Cheap, and different for all samples of a prompt, so that no advantage is 0."""

import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return zlib.crc32(solution_str.encode()) / 2**32
'''


def prepare(folder: Path, options: argparse.Namespace) -> Path:
    """The folder of a task: ``prompts.jsonl``, ``reward.py``, and ``task.json``, which says what
    the model's folder is called. What is complete already is left alone.
    """
    shape, workload = MODELS[options.model], TASKS[options.workload]
    planted = f"-mean{workload.mean_response}" if workload.mean_response else ""
    planted += "-balanced" if options.balanced else ""
    model = folder / f"{options.model}{planted}"
    config = shape.hf_config("bfloat16")
    if not holds(model / "config.json", config):
        write_model(model, shape, mean_response=workload.mean_response, balanced=options.balanced)
        write_json(model / "config.json", config)
    task = folder / f"{options.model}-{options.workload}"
    content = {"model": model.name, "end_id": EOS_ID, **asdict(workload)}
    if not holds(task / "task.json", content):
        task.mkdir(exist_ok=True)
        write_prompts(task, workload, vocabulary=shape.vocabulary)
        (task / "reward.py").write_text(REWARD)
        write_json(task / "task.json", content)
    return task


def holds(path: Path, content: dict[str, object]) -> bool:
    """Whether the file, which is written last, says the same."""
    return path.is_file() and json.loads(path.read_text()) == content


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_model(folder: Path, shape: Shape, *, mean_response: int | None, balanced: bool) -> None:
    """Weights and tokenizer, without config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    platform = select_platform("auto")
    decoder = random_decoder(
        shape,
        device=platform.device_type,
        dtype=torch.bfloat16,
        operators=operators_for(platform),
    )
    if balanced:  # first, as it draws the embeddings anew
        plant_balance(decoder)
    if mean_response is not None:
        plant_end(decoder, mean_response)
    save_hf_folder(decoder, folder)
    del decoder
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    write_tokenizer(folder, shape.vocabulary)
    write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    if shape.sees:
        write_json(folder / "preprocessor_config.json", PIXELS)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word is the number of its token: as many tokens as words, and every token has a text."""
    words = {PAD_ID: PAD, EOS_ID: END, **{number: text for text, number in VISION_IDS.items()}}
    tokenizer = Tokenizer(WordLevel({words.get(i, str(i)): i for i in range(vocabulary)}, PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_prompts(task: Path, workload: Workload, *, vocabulary: int) -> None:
    """Random prompts of exactly the workload's length in verl's schema, with a picture each or
    without.
    """
    rng = random.Random(0)
    first = 1 + max(EOS_ID, *VISION_IDS.values())
    num_batches = NUM_BATCHES if workload.picture is None else NUM_PICTURE_BATCHES
    with (task / "prompts.jsonl").open("w") as lines:
        for index in range(num_batches * workload.prompts):
            words = " ".join(map(str, rng.choices(range(first, vocabulary), k=workload.words)))
            row: dict[str, Any] = {
                "data_source": "random",
                "prompt": [{"role": "user", "content": words}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
            if workload.picture is not None:
                path = task / f"{index}.png"
                noise = rng.randbytes(16 * 16 * 3)
                Image.frombytes("RGB", (16, 16), noise).resize(workload.picture).save(path)
                row["prompt"][0]["content"] = f"<image>{words}"
                row["images"] = [{"path": str(path)}]
            lines.write(json.dumps(row) + "\n")


def command_line(options: argparse.Namespace, task: Path, *, run_folder: Path) -> list[str]:
    """``python -m tandem.trainer.main_ppo`` with its keys: GRPO without KL, strictly on-policy."""
    content = json.loads((task / "task.json").read_text())
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    num_steps = options.warmup + options.steps + steps_ahead(options.keys)
    return [
        *(sys.executable, "-m", "tandem.trainer.main_ppo"),
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={task.parent / content['model']}",
        f"data.train_files={task / 'prompts.jsonl'}",
        "data.val_files=[]",
        f"data.train_batch_size={options.devices * content['prompts']}",
        f"data.max_prompt_length={content['prompt']}",
        f"data.max_response_length={content['response']}",
        f"custom_reward_function.path={task / 'reward.py'}",
        f"{actor}.ppo_mini_batch_size={options.devices * content['prompts']}",
        f"{actor}.optim.lr={options.lr}",
        # A second pass over the batch makes the trainer score it before the first one.
        f"{actor}.ppo_epochs={2 if options.mismatch else 1}",
        f"{rollout}.n={content['samples']}",
        f"{rollout}.temperature=1.0",
        f"{rollout}.ignore_eos={content['mean_response'] is None}",
        f"{rollout}.max_num_seqs={content['prompts'] * content['samples']}",
        f"trainer.n_gpus_per_node={options.devices}",
        f"trainer.total_training_steps={num_steps}",
        f"trainer.default_local_dir={run_folder}",
        "trainer.save_freq=0",
        "trainer.logger=[console]",
        "trainer.resume_mode=disable",
        *memory_keys(options),
        *options.keys,
    ]


def memory_keys(options: argparse.Namespace) -> list[str]:
    """Return the keys of recomputation and of micro-batches, unless the run sets them itself."""
    if options.own_memory:
        return []
    actor = "actor_rollout_ref.actor"
    return [
        f"actor_rollout_ref.model.enable_gradient_checkpointing={options.checkpointing}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={options.budget}",
    ]


def steps_ahead(keys: Sequence[str]) -> int:
    """The lag that further keys ask for: so many steps at the end generate nothing new."""
    ahead = value_of(keys, "trainer.generate_ahead_steps")
    return math.ceil(float(ahead)) if ahead and "trainer.async_pipeline=True" in keys else 0


def value_of(keys: Sequence[str], name: str) -> str | None:
    """Return the last value that further keys give a key; None if they do not name it."""
    values = [value for key, _, value in (word.partition("=") for word in keys) if key == name]
    return values[-1] if values else None


def run(command: list[str], run_folder: Path) -> tuple[list[dict[str, float]], float]:
    """The metrics of every step, and seconds from the command to those of the first step."""
    log, metrics = run_folder.with_suffix(".log"), run_folder / "metrics.jsonl"
    begin = time.perf_counter()
    first_step_s = 0.0
    with log.open("w") as stream:
        process = start(command, stdout=stream, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.01)
            if not first_step_s and metrics.is_file() and metrics.stat().st_size:
                first_step_s = time.perf_counter() - begin
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed:\n{log.read_text()[-4000:]}")
    return [json.loads(line) for line in metrics.read_text().splitlines()], first_step_s


def engine_of(run_folder: Path, keys: Sequence[str]) -> str:
    """Return the engine that generated. End the benchmark if it is not the one that ``keys`` name:
    verl's entry point replaces an engine that cannot be used.
    """
    roles = json.loads((run_folder / "config.json").read_text())["actor_rollout_ref"]
    engine = roles["rollout"]["name"]
    named = value_of(keys, ENGINE_KEY)
    if named not in (None, "auto", engine):
        sys.exit(f"{ENGINE_KEY}={named}: cannot be used here, and {engine} generated instead.")
    return engine


def summarize(records: list[dict[str, float]], *, devices: int) -> dict[str, Any]:
    """Times, rates (of one device) and memory of the counted steps."""
    steps = [r["perf/total_num_tokens"] / r["perf/wall_throughput"] / devices for r in records]
    phases = {name: [r.get(f"timing_s/{name}", 0.0) for r in records] for name in PHASES}
    spent = [sum(values) for values in zip(*phases.values(), strict=True)]
    phases["other"] = [step - seconds for step, seconds in zip(steps, spent, strict=True)]
    rates = [r["perf/wall_throughput"] for r in records]
    return {
        "step_s": statistics.median(steps),
        "all_step_s": steps,
        "phases_s": {name: statistics.median(values) for name, values in phases.items()},
        "all_phases_s": phases,
        "tokens_per_s": statistics.median(rates),
        "mean_tokens_per_s": sum(map(mul, rates, steps)) / sum(steps),
        "mean_prompt": statistics.fmean(r["prompt_length/mean"] for r in records),
        "mean_response": statistics.fmean(r["response_length/mean"] for r in records),
        "computed_share": min(r["actor/computed_sequences/share"] for r in records),
        "peak_gib": max(r["perf/max_memory_allocated_gb"] for r in records),
        "peak_reserved_gib": max(r["perf/max_memory_reserved_gb"] for r in records),
    }


def rollout_difference(records: list[dict[str, float]]) -> dict[str, float]:
    """Return how log-probs of rollout and trainer differ; empty without ``--mismatch``."""
    names = [name for name in records[0] if name.startswith("training/rollout_")]
    return {
        name: (max if name.endswith("max") else statistics.median)(r[name] for r in records)
        for name in names
    }


def pipeline(records: list[dict[str, float]]) -> dict[str, float]:
    """Return medians of busy time, waits and lags by role; empty for a synchronous run."""
    names = {name for r in records for name in r if name.startswith(ASYNCHRONOUS)}
    return {name: statistics.median(r.get(name, 0.0) for r in records) for name in sorted(names)}


def trains_adapters(keys: Sequence[str]) -> bool:
    """Whether further keys freeze the weights under adapters."""
    return bool(int(value_of(keys, "actor_rollout_ref.model.lora_rank") or 0))


def of_one_device(workload: Workload, options: argparse.Namespace) -> Workload:
    """Return the share of a device: the workload, unless further keys say how many prompts all
    devices get, or how long responses are.
    """
    batch = value_of(options.keys, "data.train_batch_size")
    length = value_of(options.keys, "data.max_response_length")
    return replace(
        workload,
        prompts=int(batch) // options.devices if batch else workload.prompts,
        response=int(length) if length else workload.response,
    )


def compare_to_limits(
    shape: Shape, workload: Workload, *, step_s: float, phases_s: dict[str, float], frozen: bool
) -> dict[str, float]:
    """The roofline of the step at the rates of this machine."""
    flops, bandwidth = matmul_rate(), copy_rate()
    generation_s = generation_floor_s(shape, workload, flops=flops, bandwidth=bandwidth)
    update_s = update_floor_s(shape, workload, flops=flops, bandwidth=bandwidth, frozen=frozen)
    products = update_flops(shape, workload, shared=False, frozen=frozen)
    update_rate = products / phases_s["update_actor"]
    moved = sum(num_bytes for _, num_bytes in decode_steps(shape, workload))
    generating_s = phases_s["gen"] or float("inf")  # beside training: the step waits for nothing
    return {
        "matmul_tflops": flops / 1e12,
        "copy_tb_per_s": bandwidth / 1e12,
        "generation_floor_s": generation_s,
        "update_floor_s": update_s,
        "floor_s": generation_s + update_s,
        "ratio_to_floor": step_s / (generation_s + update_s),
        "update_mfu_989": update_rate / PEAK_FLOPS,
        "update_mfu_matmul": update_rate / flops,
        "generation_bandwidth_share": moved / generating_s / bandwidth,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=MODELS)
    parser.add_argument("--workload", default="S", choices=TASKS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--devices", type=int, default=1, help="each gets the workload; they share all tasks"
    )
    parser.add_argument("--budget", type=int, default=24576, help="tokens of a micro-batch")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument(
        "--own-memory", action="store_true", help="give no memory key: the run sets its own"
    )
    parser.add_argument(
        "--mismatch", action="store_true", help="score rollouts too; the update passes twice then"
    )
    parser.add_argument("--folder", type=Path, help="of models and prompts; else a temporary one")
    parser.add_argument(
        "--balanced", action="store_true", help="routers send about as many tokens to each expert"
    )
    parser.add_argument("--prepare", action="store_true", help="make the folder and stop")
    parser.add_argument("--keep", type=Path, help="the folder of the run, with its trace")
    parser.add_argument("--output", type=Path)
    parser.add_argument("keys", nargs="*", help="further keys of tandem")
    return parser.parse_intermixed_args()


def benchmark(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The JSON object."""
    shape, workload = MODELS[options.model], of_one_device(TASKS[options.workload], options)
    task = prepare(folder, options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        run_folder = options.keep or Path(temporary) / "run"
        if run_folder.exists():
            sys.exit(f"--keep={run_folder}: there is something already. Name another folder.")
        run_folder.parent.mkdir(parents=True, exist_ok=True)
        command = command_line(options, task, run_folder=run_folder)
        records, first_step_s = run(command, run_folder)
        engine = engine_of(run_folder, options.keys)
    counted = records[options.warmup : options.warmup + options.steps]
    summary = summarize(counted, devices=options.devices)
    limits = {}
    machine = {"device": "cpu"}
    if torch.accelerator.is_available():
        limits = compare_to_limits(
            shape,
            workload,
            step_s=summary["step_s"],
            phases_s=summary["phases_s"],
            frozen=trains_adapters(options.keys),
        )
        machine = describe()
    return {
        "benchmark": "grpo_step",
        "system": "tandem",
        **machine,
        "model": options.model,
        "workload": options.workload,
        "settings": asdict(workload),
        "devices": options.devices,
        "warmup": options.warmup,
        "started": " ".join(command),
        "engine": engine,
        "first_step_s": first_step_s,
        **summary,
        **limits,
        "rollout_difference": rollout_difference(counted),
        "pipeline": pipeline(counted),
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    options = parse()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        if options.prepare:
            print(prepare(folder, options))
            return
        report = benchmark(options, folder)
    tell(report, options.output)
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report["phases_s"].items())
    print(
        f"{options.model} {options.workload}: step {report['step_s']:.2f} s ({phases}), "
        f"{report['tokens_per_s']:,.0f} tokens/s ({report['mean_tokens_per_s']:,.0f} in the mean), "
        f"{report['peak_gib']:.1f} GiB, "
        f"{report.get('ratio_to_floor', float('nan')):.2f} x floor, "
        f"first step after {report['first_step_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
