# SPDX-License-Identifier: Apache-2.0
"""tandem's part of SGLang's scheduler process: the keyed draw as its sampler, and the account of
weights that came.

SGLang's own loader takes the weights and returns nothing. Every parameter is therefore filled with
NaN first. A parameter that still holds NaN in the end was not written, or only in part.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import FileStore

from tandem.rollout.keyed_random import uniforms
from tandem.rollout.sampler import DrawRule, draw_rows

SAMPLER = "pytorch"
"""The ``sampling_backend`` whose sampler is replaced. On CPUs SGLang allows no other name."""
LOADER = f"{__name__}.load_weights"
"""The path of the loader among SGLang's ``custom_weight_loader``."""
FIRST, LAST = "tandem.first", "tandem.last"
"""Names that mark the begin and the end of a version among its tensors."""
ACCOUNT_BYTES = 1 << 16
"""The size of a row of the tensor named ``LAST``. Each scheduler writes its account into its row.
"""

_errors: list[str] = []


def of_sglang(module: str, name: str) -> Any:
    """Import and return an object of SGLang."""
    return getattr(import_module(f"sglang.srt.{module}"), name)


def run_scheduler(*args: Any, store: str) -> None:
    """Run SGLang's scheduler with tandem's sampler. It is the main function of the process.

    SGLang's own store would listen at every address of the host. The schedulers of an engine meet
    by a file instead.

    Args:
        args: those of SGLang's function.
        store: the path of that file, which is made.
    """
    server_args, _, _, rank = args[:4]
    size = server_args.tp_size
    meeting = FileStore(store, size)
    distributed.init_process_group(store=meeting, rank=rank, world_size=size)
    register_sampler()
    run = of_sglang("managers.scheduler", "run_scheduler_process")
    gc.freeze()  # at each update SGLang collects, and need not walk over all of its modules
    gc.enable()
    run(*args)


def register_sampler() -> None:
    """Register tandem's sampler with SGLang, which prefers registered ones to its own."""
    of_sglang("layers.sampler", "register_sampler_backend")(SAMPLER, _make_sampler)


def draw(
    logits_BV: Tensor, rows: Sequence[Mapping[str, Any]], *, position_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token per row, and return it with its log-prob.

    Args:
        rows: ``custom_params`` of each request: ``key``, ``start`` (the length of the prompt),
            ``rule`` (temperature, top-k, top-p) and ``forced`` tokens, [] for samples.
        position_B: the position in the sequence of the token before the drawn one.
    """
    device = logits_BV.device
    starts_B = torch.tensor([row["start"] for row in rows], device=device)
    index_B = position_B.to(device) + 1 - starts_B
    keys_B = torch.tensor([row["key"] for row in rows], device=device)
    drawn = draw_rows(
        logits_BV,
        uniforms(keys_B, index_B[:, None])[:, 0],
        rules=[DrawRule(*row["rule"]) for row in rows],
        forced={
            number: row["forced"][min(max(index, 0), len(row["forced"]) - 1)]
            for number, (row, index) in enumerate(zip(rows, index_B.tolist(), strict=True))
            if row["forced"]
        },
    )
    return drawn.token_B, drawn.logp_B


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load a part of a version by SGLang's loader.

    ``LAST`` receives the accounts as JSON: (number of schedulers, ACCOUNT_BYTES), uint8.
    """
    for name, tensor in tensors:
        if name == FIRST:
            _errors.clear()
            _fill_with_nan(model)
        elif name == LAST:
            account = json.dumps({"errors": _errors[:1], "unwritten": _unwritten(model)[:100]})
            data = account.encode()[:ACCOUNT_BYTES].ljust(ACCOUNT_BYTES)
            row = tensor[distributed.get_rank()]
            row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        else:
            _load(model, name, tensor=tensor)


def _load(model: Any, name: str, *, tensor: Tensor) -> None:
    """Load one tensor. An exception would end the process, so that it is noted instead."""
    try:
        model.load_weights([(name, tensor)])
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        _errors.append(f"{name}: {type(error).__name__}: {first}")


@torch.no_grad()
def _fill_with_nan(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))


def _unwritten(model: nn.Module) -> list[str]:
    """Return the names of parameters that hold NaN."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and bool(torch.isnan(parameter.data).any())
    ]


def _make_sampler() -> Any:
    """Return a sampler of SGLang whose tokens and log-probs are those of the keyed draw."""
    base = of_sglang("layers.sampler", "Sampler")

    class KeyedSampler(base):
        """A sampler that reads ``custom_params`` of the requests and has no state."""

        def forward(  # noqa: PLR0913, PLR0917 - SGLang's own parameters
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: Sequence[int],
            token_ids_logprobs: Sequence[Sequence[int]],
            positions: Tensor,
            **_: object,
        ) -> Tensor:
            """Draw a token per row of the batch."""
            logits_BV = logits_output.next_token_logits
            token_B, logp_B = draw(logits_BV, sampling_info.custom_params, position_B=positions)
            if return_logprob:
                logits_output.next_token_logprobs = logp_B
            return token_B

    return KeyedSampler()
