# SPDX-License-Identifier: Apache-2.0
"""A GRPO step of TRL with colocated vLLM on the model, prompts, lengths and reward of
``grpo_step.py``. Needs trl, datasets and vllm, not tandem.

    python benchmarks/grpo_step.py --model qwen2.5-0.5b --workload S --folder FOLDER --prepare
    python benchmarks/peers/trl_step.py --model qwen2.5-0.5b --workload S --folder FOLDER

The JSON object has the form of ``grpo_step.py``'s. Sections are TRL's own profiling contexts. TRL
makes one optimizer step of a batch, as there; a micro-batch is as many sequences of the greatest
length (it pads) as ``--budget`` tokens hold, unless ``--micro-batch`` says.

Prompts with pictures are TRL's conversations. vLLM is then given one token for each picture, which
it replaces by the picture's own: TRL 1.16 would hand it those, and vLLM would see all but one of
them twice (TRL's issue 6294).
"""

import argparse
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
import transformers
import trl
from reporting import describe, tell_step
from trl.data_utils import prepare_multimodal_messages
from trl.extras.profiling import ProfilingContext

sys.path.append(str(Path(__file__).parents[1]))
from processes import children_end  # noqa: E402 - of the folder above

ON_GPU = torch.cuda.is_available()
DIFFERENCE = "sampling/sampling_logp_difference/"
PACKAGES = ("trl", "transformers", "torch", "vllm", "accelerate")
TOKEN_SIDE = 28
"""The side of a token of Qwen2.5-VL in pixels."""
PICTURE_ID = 259
"""Of a picture's tokens, as in ``shapes.py``."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


class Clock(transformers.TrainerCallback):
    """When optimizer steps ended, seconds of TRL's sections within each, and its logs."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.sections: list[dict[str, float]] = []
        self.logs: list[dict[str, float]] = []
        self.first_step_s = 0.0
        self._running: dict[str, float] = defaultdict(float)

    def add(self, name: str, seconds: float) -> None:
        """A section has ended."""
        self._running[name.removeprefix("GRPOTrainer.")] += seconds

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.sections.append(dict(self._running))
        self._running.clear()
        if len(self.sections) == 1:
            self.first_step_s = time.time() - psutil.Process().create_time()

    def on_log(self, *_: object, logs: dict | None = None, **__: object) -> None:
        if logs and "reward" in logs:
            self.logs.append(logs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--workload", default="S")
    parser.add_argument("--folder", type=Path, required=True, help="made by grpo_step.py")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--budget", type=int, default=24576, help="tokens of a micro-batch")
    parser.add_argument("--micro-batch", type=int, help="sequences of a micro-batch")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--dtype", default="float32", help="of the weights; bf16 autocast anyway")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--gpu-memory", type=float, default=0.35, help="vLLM's share of the memory")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument(
        "--sleep", action="store_true", help="vLLM gives its memory back while TRL trains"
    )
    parser.add_argument(
        "--correction",
        action="store_true",
        help="TRL's default: score rollouts too, report and correct the difference",
    )
    parser.add_argument("--lora-rank", type=int, default=0, help="adapters of all linear maps")
    parser.add_argument("--no-vllm", action="store_true", help="generate by transformers")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def micro_batch(options: argparse.Namespace, task: dict[str, Any]) -> int:
    """The largest divisor of the batch that the budget of tokens holds."""
    if options.micro_batch:
        return options.micro_batch
    sequences = task["prompts"] * task["samples"]
    most = max(options.budget // (task["prompt"] + task["response"]), 1)
    return max(size for size in range(1, most + 1) if sequences % size == 0)


def settings(options: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any]:
    """Return GRPOConfig's settings: the recipe of ``grpo_step.py`` at TRL's fastest."""
    size = micro_batch(options, task)
    accumulated = task["prompts"] * task["samples"] // size
    fixed_length = task["mean_response"] is None
    forced: dict[str, Any] = {"ignore_eos": True} if fixed_length else {}
    if options.no_vllm:
        forced = {"min_new_tokens": task["response"]} if fixed_length else {}
    elif task["picture"]:
        # A picture's token in a response would have no picture; without vLLM, TRL sees to it.
        forced["logit_bias"] = {PICTURE_ID: -100.0}
    chosen = {
        "use_cpu": not ON_GPU,
        "bf16": ON_GPU,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": accumulated,
        "num_iterations": 1,
        "num_generations": task["samples"],
        "max_completion_length": task["response"],
        "generation_kwargs": forced or None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "gradient_checkpointing": options.checkpointing,
        "model_init_kwargs": {"dtype": options.dtype, "attn_implementation": options.attention},
        "max_steps": options.warmup + options.steps,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
        "use_vllm": not options.no_vllm,
    }
    if not options.no_vllm:
        chosen |= {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.gpu_memory,
            "vllm_enable_sleep_mode": options.sleep,
            "vllm_max_model_length": task["prompt"] + task["response"],
            "vllm_importance_sampling_correction": options.correction,
        }
    return chosen


def train(options: argparse.Namespace, chosen: dict[str, Any], *, task: dict[str, Any]) -> Clock:
    """The whole run."""
    place = options.folder / f"{options.model}-{options.workload}"
    score = runpy.run_path(str(place / "reward.py"))["compute_score"]

    def reward(completions: list[Any], **_: object) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [score("random", text, "", {}) for text in texts]

    clock = Clock()
    # TRL hands these seconds to trackers on the network only.
    ProfilingContext._log_metrics = lambda context, seconds: clock.add(context.name, seconds)
    with tempfile.TemporaryDirectory() as output:
        model, processing = load(options.folder / task["model"], Path(output), task=task)
        rows = dataset(place, Path(output))
        lengths = {num_tokens(row, processing) for row in rows}
        if lengths != {task["prompt"]}:
            sys.exit(f"prompts have {sorted(lengths)} tokens, not {task['prompt']}")
        trainer = trl.GRPOTrainer(
            model=str(model),
            processing_class=processing,
            reward_funcs=reward,
            args=trl.GRPOConfig(output_dir=output, **chosen),
            train_dataset=rows,
            callbacks=[clock],
            peft_config=adapters(options),
        )
        if task["picture"] and not options.no_vllm:
            engine = trainer.vllm_generation
            engine.generate = with_one_token_a_picture(engine.generate)
        trainer.train()
    return clock


def load(model: Path, folder: Path, *, task: dict[str, Any]) -> tuple[Path, Any]:
    """Return the model's folder and its tokenizer, or its processor if prompts have pictures.

    The processor lies in a folder of its own beside links to the weights. vLLM wants a token of
    videos, and holds memory for the largest picture that the processor lets pass.
    """
    # AutoTokenizer would take the words of any qwen2 folder for Qwen's own byte pairs.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(model)
    if not task["picture"]:
        return model, tokenizer
    tokenizer.add_tokens(["<|video_pad|>"], special_tokens=True)
    tokenizer.padding_side = "left"
    processor = transformers.Qwen2_5_VLProcessor.from_pretrained(model, tokenizer=tokenizer)
    processor.chat_template = tokenizer.chat_template = CHAT_TEMPLATE
    width, height = (TOKEN_SIDE * round(side / TOKEN_SIDE) for side in task["picture"])
    processor.image_processor.size["longest_edge"] = width * height
    made = folder / "model"
    made.mkdir()
    for path in model.resolve().iterdir():
        if path.name.startswith(("config", "generation_config", "model")):
            (made / path.name).symlink_to(path)
    processor.save_pretrained(made)
    return made, processor


def dataset(place: Path, folder: Path) -> datasets.Dataset:
    """Return the prompts as TRL takes them: texts, or conversations with a picture each."""
    rows = []
    for line in (place / "prompts.jsonl").read_text().splitlines():
        read = json.loads(line)
        text = read["prompt"][0]["content"]
        row = {"prompt": text}
        if "images" in read:
            message = {"role": "user", "content": text.removeprefix("<image>")}
            row = {"prompt": [message], "image": read["images"][0]["path"]}
        rows.append(json.dumps(row) + "\n")
    # By a file: datasets cannot pickle every release of pyarrow's types, as from_dict does.
    path = folder / "rows.jsonl"
    path.write_text("".join(rows))
    made = datasets.Dataset.from_json(str(path), cache_dir=str(folder))
    return made.cast_column("image", datasets.Image()) if "image" in made.features else made


def num_tokens(row: dict[str, Any], processing: Any) -> int:
    """Return how many tokens a prompt has, those of its picture too."""
    if "image" not in row:
        return len(processing(row["prompt"])["input_ids"])
    prompt = prepare_multimodal_messages(row["prompt"], images=[row["image"]])
    return len(processing.apply_chat_template([prompt], tokenize=True)[0])


def with_one_token_a_picture(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return TRL's call of vLLM for prompts of which each run of a picture's tokens becomes one."""

    def shortened(prompts: list[list[int]], **others: Any) -> Any:
        return generate(prompts=[list(merged(ids)) for ids in prompts], **others)

    def merged(ids: list[int]) -> Iterator[int]:
        for token, run in groupby(ids):
            yield from [token] if token == PICTURE_ID else run

    return shortened


def adapters(options: argparse.Namespace) -> Any:
    """Return PEFT's configuration; None to train all parameters."""
    if not options.lora_rank:
        return None
    import peft

    rank = options.lora_rank
    return peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")


def phases(step_s: float, sections: dict[str, float]) -> dict[str, float]:
    """Under the names of ``grpo_step.py``."""
    seconds = defaultdict(float, sections)
    gen = sum(value for name, value in sections.items() if ".generate" in name)
    reward, sync = seconds["_calculate_rewards"], seconds["sync_weights"]
    prepared = seconds["_prepare_inputs"]
    return {
        "gen": gen,
        "reward": reward,
        "update_weights": sync,
        "update_actor": step_s - prepared,
        "other": prepared - gen - reward - sync,
    }


def summarize(
    clock: Clock, options: argparse.Namespace, *, task: dict[str, Any]
) -> dict[str, object]:
    """Times, rates and memory of the counted steps."""
    steps = [end - begin for begin, end in zip(clock.ends[:-1], clock.ends[1:], strict=True)]
    steps, sections = steps[options.warmup :], clock.sections[options.warmup :]
    logs = clock.logs[options.warmup :]
    parts = [phases(step, spent) for step, spent in zip(steps, sections, strict=True)]
    lengths = [log["completions/mean_length"] for log in logs]
    sequences = task["prompts"] * task["samples"]
    rates = [
        sequences * (task["prompt"] + length) / step
        for length, step in zip(lengths, steps, strict=True)
    ]
    differences = {
        f"training/rollout_logp_diff_{kind}": [log[DIFFERENCE + kind] for log in logs]
        for kind in ("mean", "max")
        if DIFFERENCE + kind in logs[0]
    }
    return {
        "first_step_s": clock.first_step_s,
        "step_s": statistics.median(steps),
        "all_step_s": steps,
        "phases_s": {name: statistics.median(p[name] for p in parts) for name in parts[0]},
        "all_phases_s": {name: [p[name] for p in parts] for name in parts[0]},
        "sections_s": {
            name: statistics.median(spent.get(name, 0.0) for spent in sections)
            for name in sections[0]
        },
        "tokens_per_s": statistics.median(rates),
        "mean_response": statistics.fmean(lengths),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if ON_GPU else 0.0,
        "rollout_difference": {
            name: max(values) if name.endswith("max") else statistics.median(values)
            for name, values in differences.items()
        },
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    options = parse()
    place = options.folder / f"{options.model}-{options.workload}"
    task = json.loads((place / "task.json").read_text())
    chosen = settings(options, task)
    clock = train(options, chosen, task=task)
    report = {
        "benchmark": "grpo_step",
        "system": "trl" if options.no_vllm else "trl + vllm",
        **describe(PACKAGES),
        "model": options.model,
        "workload": options.workload,
        "settings": task,
        "warmup": options.warmup,
        "peer_settings": chosen,
        "lora_rank": options.lora_rank,
        **summarize(clock, options, task=task),
    }
    tell_step(report, options.output)


if __name__ == "__main__":
    main()
