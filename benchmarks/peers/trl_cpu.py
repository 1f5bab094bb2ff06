# SPDX-License-Identifier: Apache-2.0
"""A GRPO job in TRL on the CPU, with settings that match the recipe of ``cpu_tiny.py``. Needs trl
and datasets.

Prints one JSON object: seconds of each rollout step (all optimizer steps on its samples included),
rewards, and the settings. ``python trl_cpu.py --help`` lists the arguments; ``cpu_tiny.py`` passes
them.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import datasets
import torch
import transformers
import trl

sys.path.append(str(Path(__file__).parents[1]))
from processes import children_end  # noqa: E402 - of the folder above

ANSWER = re.compile(r"#### (-?[0-9]+)")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="parquet in verl's schema")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--num-prompts", type=int, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--response-length", type=int, required=True)
    parser.add_argument("--minibatches", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--fixed-length", action="store_true", help="never stop early")
    return parser.parse_args()


def load_prompts(path: str) -> datasets.Dataset:
    rows = datasets.Dataset.from_parquet(path)
    golds = [row["ground_truth"] for row in rows["reward_model"]]
    return datasets.Dataset.from_dict({"prompt": list(rows["prompt"]), "gold": golds})


def last_answer(completion: object) -> str | None:
    text = completion if isinstance(completion, str) else completion[0]["content"]
    found = ANSWER.findall(text)
    return found[-1] if found else None


def reward(completions: list, gold: list, **_: object) -> list[float]:
    return [float(last_answer(c) == g) for c, g in zip(completions, gold, strict=True)]


def text_reward(completions: list, gold: list, **_: object) -> list[float]:
    return [(len(c) % 7) / 7 for c in completions]


class StepClock(transformers.TrainerCallback):
    """Wall-clock time at the end of every optimizer step, and the logged rewards."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        self.times.append(time.perf_counter())

    def on_log(self, *_: object, logs: dict | None = None, **__: object) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def settings(options: argparse.Namespace) -> trl.GRPOConfig:
    batch = options.num_prompts * options.num_samples
    forced = {"min_new_tokens": options.response_length} if options.fixed_length else None
    return trl.GRPOConfig(
        output_dir="/tmp/trl_cpu",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=batch // options.minibatches,
        steps_per_generation=options.minibatches,
        num_generations=options.num_samples,
        max_completion_length=options.response_length,
        generation_kwargs=forced,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate=options.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5 * options.minibatches,
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        max_steps=options.steps * options.minibatches,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        seed=0,
        disable_tqdm=True,
        log_completions=False,
        dataloader_num_workers=0,
    )


@children_end()
def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    clock = StepClock()
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=text_reward if options.fixed_length else reward,
        args=settings(options),
        train_dataset=load_prompts(options.prompts),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    ends = clock.times[:: options.minibatches]
    seconds = [end - begin for begin, end in zip(ends[:-1], ends[1:], strict=True)]
    result = {
        "system": {lib.__name__: lib.__version__ for lib in (trl, transformers, torch)},
        "step_s": seconds,
        "rewards": clock.rewards,
        "settings": vars(options),
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
