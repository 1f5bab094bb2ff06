# SPDX-License-Identifier: Apache-2.0
"""Generation by vLLM alone on the model, prompts and lengths of ``grpo_step.py``. Needs vllm, not
tandem.

    python benchmarks/grpo_step.py --model qwen2.5-0.5b --workload S --folder FOLDER --prepare
    python benchmarks/peers/vllm_decode.py --model qwen2.5-0.5b --workload S --folder FOLDER

The JSON object has the form of ``decode.py``'s. Text is not made of the tokens, and without
``--logprobs`` no log-prob is returned, which is less work than tandem's engine does.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm
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

GRAPH_SEQUENCES = 512
"""Up to so many sequences vLLM captures graphs of its own accord."""


def parse() -> argparse.Namespace:
    parser = make_parser()
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    return parser.parse_intermixed_args()


def engine_settings(options: argparse.Namespace, tasks: list[Task]) -> dict[str, Any]:
    """Return the fastest settings of ``vllm.LLM``."""
    sequences = min(most_sequences(tasks), options.max_num_seqs)
    chosen = {
        "model": model_folder(options, tasks),
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": longest(tasks),
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "gpu_memory_utilization": options.gpu_memory,
        "enable_prefix_caching": not options.no_prefix_caching,
        "disable_log_stats": True,
    }
    if sequences > GRAPH_SEQUENCES:
        chosen["compilation_config"] = {"max_cudagraph_capture_size": sequences}
    return chosen | further_settings(options)


def sampling_settings(options: argparse.Namespace, task: Task) -> dict[str, Any]:
    """Return the settings of ``vllm.SamplingParams``."""
    fixed_length = task["mean_response"] is None
    return {
        "n": task["samples"],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": task["response"],
        "ignore_eos": fixed_length,
        "stop_token_ids": [] if fixed_length else [task["end_id"]],
        "logprobs": 0 if options.logprobs else None,
        "detokenize": False,
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    options = parse()
    tasks = read_tasks(options)
    chosen = engine_settings(options, tasks)
    begin = time.perf_counter()
    engine = vllm.LLM(**chosen)
    ready_s = time.perf_counter() - begin

    def generate(prompts: list[list[int]], task: Task) -> list[int]:
        sampled = vllm.SamplingParams(**sampling_settings(options, task))
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        results = engine.generate(asked, sampled, use_tqdm=False)
        return [len(out.token_ids) for result in results for out in result.outputs]

    peer = Peer((vllm, torch), chosen, ready_s, generate, partial(sampling_settings, options))
    run(options, tasks, peer=peer)


if __name__ == "__main__":
    main()
