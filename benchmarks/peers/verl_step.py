# SPDX-License-Identifier: Apache-2.0
"""A GRPO step of verl with vLLM on one GPU, on the model, prompts, lengths and reward of
``grpo_step.py``. Needs verl 0.9, vllm and pandas; not tandem, and no trl 1, which verl mistakes for
an older one.

    python benchmarks/grpo_step.py --model qwen2.5-0.5b --workload S --folder FOLDER --prepare
    python benchmarks/peers/verl_step.py --model qwen2.5-0.5b --workload S --folder FOLDER

The JSON object has the form of ``grpo_step.py``'s. Further arguments are keys of verl. Steps are
wall-clock from one line of verl's file logger to the next, nothing left out; phases are verl's
own. Rewards are computed while verl generates, so they have no phase. The memory is that of the
process that trains; vLLM runs in another one.

There need be no flash-attn: sequences of equal lengths lose nothing by padding, with which
PyTorch's own attention works. verl's log-probs from logits walk over tokens one by one without
flash-attn, so they come from its fused kernels.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas
from reporting import describe, tell_step

sys.path.append(str(Path(__file__).parents[1]))
from processes import children_end, start  # noqa: E402 - of the folder above

PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights")
PACKAGES = ("verl", "transformers", "torch", "vllm", "ray", "transferqueue", "tensordict")
CHAT_TOKENS = ("\n", "<|im_end|>")
"""verl asks any qwen2 or qwen3 for them, though one turn needs neither."""
CAPTURED = (1, 2, 4, 8, 16, 32)
"""Batch sizes of vLLM's graphs, besides multiples of 64: fewer than its own, to start sooner."""
SAMPLER = """from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Sampler(ReplayBuffer):
    def __init__(self, **settings):
        super().__init__(poll_interval={poll}, **settings)
"""
"""verl's own asks every 2 s whether all samples of a batch are there."""
TAIL = 60
"""Lines of the log that are shown when verl fails."""


@dataclass(eq=False)
class Watch:
    """verl's records of the steps, and when each came in seconds since the start."""

    records: list[dict[str, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def read(self, path: Path, now: float) -> None:
        """Take the whole lines that are new."""
        if not path.is_file():
            return
        lines = path.read_text().split("\n")[:-1]
        for line in lines[len(self.records) :]:
            self.records.append(json.loads(line)["data"])
            self.ends.append(now)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--workload", default="S")
    parser.add_argument("--folder", type=Path, required=True, help="made by grpo_step.py")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--limit", type=float, help="stop after so many seconds, however far it is")
    parser.add_argument("--budget", type=int, default=24576, help="tokens of a micro-batch")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--remove-padding", action="store_true", help="needs flash-attn")
    parser.add_argument("--fused", default="torch", choices=["torch", "triton", "none"])
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="vLLM's share of the memory")
    parser.add_argument("--keep-cache", action="store_true", help="vLLM does not sleep in updates")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument(
        "--bypass", action="store_true", help="the rollout's log-probs are the old ones: no scoring"
    )
    parser.add_argument("--lora-rank", type=int, default=0, help="adapters of all linear maps")
    parser.add_argument(
        "--poll", type=float, default=0.05, help="seconds between looks at the samples; verl's: 2"
    )
    parser.add_argument("--workers", type=int, default=8, help="of agent loops, and of rewards")
    parser.add_argument("--log", type=Path, help="where verl's output is kept")
    parser.add_argument("--output", type=Path)
    parser.add_argument("keys", nargs="*", help="further keys of verl")
    return parser.parse_intermixed_args()


def write_data(place: Path, folder: Path) -> Path:
    """Write the prompts as parquet."""
    rows = [json.loads(line) for line in (place / "prompts.jsonl").read_text().splitlines()]
    path = folder / "prompts.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return path


def write_tokenizer(model: Path, folder: Path) -> Path:
    """Write the model's tokenizer with ``CHAT_TOKENS``, whose numbers lie beyond the vocabulary.

    config.json is left out. With it, AutoTokenizer takes the words of any qwen2 folder for byte
    pairs of Qwen's own tokenizer.
    """
    made = folder / "tokenizer"
    made.mkdir()
    content = json.loads((model / "tokenizer.json").read_text())
    number = 1 + max(content["model"]["vocab"].values())
    for token in CHAT_TOKENS:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        content["added_tokens"].append({"id": number, "content": token, **flags})
        number += 1
    (made / "tokenizer.json").write_text(json.dumps(content))
    settings = (model / "tokenizer_config.json").read_text()
    (made / "tokenizer_config.json").write_text(settings)
    return made


def write_sampler(options: argparse.Namespace, folder: Path) -> Path:
    """Write verl's sampler of batches with another interval."""
    path = folder / "sampler.py"
    path.write_text(SAMPLER.format(poll=options.poll))
    return path


def settings(options: argparse.Namespace, task: dict[str, Any], *, folder: Path) -> dict[str, Any]:
    """Return verl's keys: the recipe of ``grpo_step.py`` at verl's fastest."""
    place = options.folder / f"{options.model}-{options.workload}"
    model = options.folder / task["model"]
    data = write_data(place, folder)
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": options.bypass,
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": task["prompts"],
        "data.max_prompt_length": task["prompt"],
        "data.max_response_length": task["response"],
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "reward.custom_reward_function.path": place / "reward.py",
        "reward.num_workers": options.workers,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.tokenizer_path": write_tokenizer(model, folder),
        **actor_settings(options, task),
        **rollout_settings(options, task),
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.tokenizer": folder / "tokenizer",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "trainer.v1.sampler.custom_sampler.path": write_sampler(options, folder),
        "trainer.v1.sampler.custom_sampler.name": "Sampler",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1000,
        "trainer.total_training_steps": options.warmup + options.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.logger": "[console,file]",
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }


def actor_settings(options: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the trained model: fp32 weights and bf16 products, as verl's defaults."""
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    return {
        f"+{model}.override_config.attn_implementation": options.attention,
        f"{model}.use_remove_padding": options.remove_padding,
        f"{model}.use_fused_kernels": options.fused != "none",
        f"{model}.fused_kernel_options.impl_backend": options.fused.replace("none", "torch"),
        f"{model}.enable_gradient_checkpointing": options.checkpointing,
        f"{model}.lora_rank": options.lora_rank,
        f"{model}.lora_alpha": options.lora_rank or 16,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": task["prompts"],
        f"{actor}.ppo_epochs": 1,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": options.budget,
        f"{actor}.optim.lr": options.lr,
        f"{actor}.optim.weight_decay": 0.01,
        f"{actor}.optim.lr_scheduler_type": "constant",
        f"{actor}.grad_clip": 1.0,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.fsdp_config.param_offload": False,
        f"{actor}.fsdp_config.optimizer_offload": False,
        f"{actor}.fsdp_config.model_dtype": "fp32",
    }


def rollout_settings(options: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of vLLM: bf16 weights, graphs, and room for all sequences at once."""
    rollout = "actor_rollout_ref.rollout"
    sequences = task["prompts"] * task["samples"]
    captured = sorted({*CAPTURED, *range(64, sequences, 64), sequences})
    return {
        f"{rollout}.name": "vllm",
        f"{rollout}.mode": "async",
        f"{rollout}.n": task["samples"],
        f"{rollout}.temperature": 1.0,
        f"{rollout}.top_p": 1.0,
        f"{rollout}.top_k": -1,
        f"{rollout}.ignore_eos": task["mean_response"] is None,
        f"{rollout}.dtype": "bfloat16",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": options.gpu_memory,
        f"{rollout}.free_cache_engine": not options.keep_cache,
        f"{rollout}.enforce_eager": False,
        f"{rollout}.max_model_len": task["prompt"] + task["response"],
        f"{rollout}.max_num_seqs": sequences,
        f"{rollout}.max_num_batched_tokens": 16384,
        f"{rollout}.cudagraph_capture_sizes": str([n for n in captured if n <= 512]),
        f"{rollout}.load_format": "safetensors" if options.lora_rank else "dummy",
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.agent.num_workers": options.workers,
    }


def train(options: argparse.Namespace, chosen: dict[str, Any], *, folder: Path) -> Watch:
    """Run verl in a process of its own, and return what it recorded."""
    log, metrics = options.log or folder / "verl.log", folder / "metrics.jsonl"
    keys = [f"{name}={value}" for name, value in chosen.items()]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *keys, *options.keys]
    changed = {"VERL_FILE_LOGGER_PATH": str(metrics), "HF_HUB_OFFLINE": "1"}
    watch, begin = Watch(), time.perf_counter()
    with log.open("w") as stream:
        process = start(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **changed},
        )
        while process.poll() is None:
            time.sleep(0.01)
            now = time.perf_counter() - begin
            watch.read(metrics, now)
            if len(watch.records) == options.warmup + options.steps:
                break
            if options.limit and now > options.limit:
                print(f"stopped after {now:.0f} s, {len(watch.records)} steps", file=sys.stderr)
                break
    if len(watch.records) <= options.warmup:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
        sys.exit(f"{' '.join(command)}\nmade {len(watch.records)} steps only:\n{tail}")
    return watch


def summarize(watch: Watch, options: argparse.Namespace) -> dict[str, object]:
    """Return times, rates and memory of the counted steps."""
    ends, records = watch.ends[options.warmup - 1 :], watch.records[options.warmup :]
    steps = [end - begin for begin, end in zip(ends[:-1], ends[1:], strict=True)]
    parts = {name: [r.get(f"timing_s/{name}", 0.0) for r in records] for name in PHASES}
    spent = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts["other"] = [step - seconds for step, seconds in zip(steps, spent, strict=True)]
    rates = [r["perf/total_num_tokens"] / step for r, step in zip(records, steps, strict=True)]
    return {
        "first_step_s": watch.ends[0],
        "step_s": statistics.median(steps),
        "all_step_s": steps,
        "phases_s": {name: statistics.median(values) for name, values in parts.items()},
        "all_phases_s": parts,
        "sections_s": medians(records, "timing_s/"),
        "tokens_per_s": statistics.median(rates),
        "mean_response": statistics.fmean(r["response_length/mean"] for r in records),
        "peak_gib": peak(records, "perf/max_memory_allocated_gb"),
        "peak_reserved_gib": peak(records, "perf/max_memory_reserved_gb"),
        "rollout_difference": {
            **medians(records, "training/rollout_"),
            **medians(records, "rollout_corr/"),
        },
    }


def medians(records: list[dict[str, float]], prefix: str) -> dict[str, float]:
    """Return the medians of metrics with the prefix; of those that are maxima, the greatest."""
    names = [name for name in records[0] if name.startswith(prefix)]
    return {
        name: (max if "max" in name else statistics.median)(r[name] for r in records)
        for name in names
        if all(isinstance(r.get(name), int | float) for r in records)
    }


def peak(records: list[dict[str, float]], suffix: str) -> float:
    """Return the greatest value of any metric of that name, whatever role logs it; 0 for none."""
    return max((v for r in records for name, v in r.items() if name.endswith(suffix)), default=0.0)


@children_end()
def main() -> None:
    """See the module docstring."""
    options = parse()
    if options.warmup < 1:
        sys.exit("--warmup: the first step has no step before it. Give at least 1.")
    options.folder = options.folder.resolve()
    options.log = options.log and options.log.resolve()
    place = options.folder / f"{options.model}-{options.workload}"
    task = json.loads((place / "task.json").read_text())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        chosen = settings(options, task, folder=Path(temporary))
        watch = train(options, chosen, folder=Path(temporary))
    report = {
        "benchmark": "grpo_step",
        "system": "verl + vllm",
        **describe(PACKAGES),
        "model": options.model,
        "workload": options.workload,
        "settings": task,
        "warmup": options.warmup,
        "peer_settings": {name: str(value) for name, value in chosen.items()},
        "lora_rank": options.lora_rank,
        **summarize(watch, options),
    }
    tell_step(report, options.output)


if __name__ == "__main__":
    main()
