# SPDX-License-Identifier: Apache-2.0
"""Generation by SGLang alone on the model, prompts and lengths of ``grpo_step.py``. Needs sglang,
not tandem.

    python benchmarks/grpo_step.py --model qwen2.5-0.5b --workload S --folder FOLDER --prepare
    python benchmarks/peers/sglang_decode.py --model qwen2.5-0.5b --workload S --folder FOLDER

The JSON object has the form of ``decode.py``'s. Text is not made of the tokens, and without
``--logprobs`` no log-prob is returned, which is less work than tandem's engine does. Further
arguments, ``name=value``, are arguments of ``sglang.Engine``.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import sglang
import torch
import transformers
from generating import (
    Peer,
    Task,
    further_settings,
    longest,
    make_parser,
    model_folder,
    most_sequences,
    read_tasks,
    run,
)

sys.path.append(str(Path(__file__).parents[1]))
from processes import children_end  # noqa: E402 - of the folder above

FREE_POSITIONS = 8
"""SGLang ends a sequence before the last positions of its context."""


def engine_settings(options: argparse.Namespace, tasks: list[Task]) -> dict[str, Any]:
    """Return the settings of ``sglang.Engine``."""
    on_gpu = torch.cuda.is_available()
    sequences = most_sequences(tasks)
    chosen: dict[str, Any] = {
        "model_path": model_folder(options, tasks),
        "dtype": "bfloat16",
        "random_seed": 0,
        "context_length": longest(tasks) + FREE_POSITIONS,
        "max_running_requests": sequences,
        "skip_tokenizer_init": True,
        "disable_radix_cache": options.no_prefix_caching,
        "log_level": "warning",
    }
    if on_gpu:
        chosen |= {
            "mem_fraction_static": options.gpu_memory,
            "cuda_graph_max_bs_decode": sequences,
            "disable_prefill_cuda_graph": True,  # prompts are short, and capture takes minutes
        }
    else:
        chosen |= {"device": "cpu", "attention_backend": "torch_native"}
    return chosen | further_settings(options)


def sampling_settings(task: Task) -> dict[str, Any]:
    """Return SGLang's ``sampling_params``."""
    fixed_length = task["mean_response"] is None
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": task["response"],
        "ignore_eos": fixed_length,
        "stop_token_ids": [] if fixed_length else [task["end_id"]],
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    options = make_parser().parse_intermixed_args()
    tasks = read_tasks(options)
    chosen = engine_settings(options, tasks)
    begin = time.perf_counter()
    engine = sglang.Engine(**chosen)
    ready_s = time.perf_counter() - begin

    def generate(prompts: list[list[int]], task: Task) -> list[int]:
        # One request a sample: with n in a request, SGLang first generates one token for each
        # prompt and waits for it.
        asked = [ids for ids in prompts for _ in range(task["samples"])]
        results = engine.generate(
            input_ids=asked,
            sampling_params=sampling_settings(task),
            return_logprob=options.logprobs,
        )
        return [len(result["output_ids"]) for result in results]

    peer = Peer((sglang, torch, transformers), chosen, ready_s, generate, sampling_settings)
    run(options, tasks, peer=peer)
    engine.shutdown()


if __name__ == "__main__":
    main()
