# SPDX-License-Identifier: Apache-2.0
"""vLLM in several processes of ours: an engine whose tensors are split over consecutive ranks.

Each rank is told the same calls in the same order, schedules by itself, and draws the same tokens
from the same logits. There are no messages between schedulers. The ranks therefore compare digests
of their calls and tokens, because ranks that differ would add up unrelated numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import distributed

from tandem.api import EngineFailure
from tandem.rollout.vllm.library import of_vllm

_STATE = "distributed.parallel_state"
_ENDED = "vLLM: another rank of the engine has ended"


class Ranks:
    """The ranks of one engine, seen from one of them.

    Build it before vLLM starts: a world of processes that exists then is the pool's, and stays.
    """

    def __init__(self, size: int) -> None:
        """Take the number of ranks of an engine."""
        self._size = size
        self._is_pool = distributed.is_initialized()
        self._digest = 0

    def executor_class(self) -> type:
        """Return the class of vLLM's executor in this process.

        It joins the world of the pool, which vLLM divides into engines of consecutive ranks.
        Collective over the pool.
        """
        # By its class: vLLM replaces the name on CPUs with that of an executor with processes.
        base = of_vllm("v1.executor.uniproc_executor", "UniProcExecutor")
        if not self._is_pool:
            return base
        # vLLM names shared memory of the host by it, so that it must differ between runs.
        name = torch.tensor([os.getpid() ^ time.time_ns()])
        distributed.broadcast(name, 0)
        arguments = (f"pool:{name.item():x}", distributed.get_rank(), 0)

        class PoolExecutor(base):
            """An executor in a process of a pool."""

            def _distributed_args(self) -> tuple[str, int, int]:
                return arguments

        return PoolExecutor

    def note(self, values: tuple[Hashable, ...]) -> None:
        """Add to the digest what every rank must have seen or drawn. Values hold numbers only."""
        if self._size > 1:
            self._digest = hash((self._digest, values))

    def require_agreement(self) -> None:
        """Raise EngineFailure unless all ranks of the engine have the same digest. Collective."""
        if self._size == 1:
            return
        own = torch.tensor([self._digest])
        digests = [torch.empty_like(own) for _ in range(self._size)]
        try:
            distributed.all_gather(digests, own, group=self._group())
        except RuntimeError as error:
            raise EngineFailure(_ENDED) from error
        for rank, digest in enumerate(digests):
            if not torch.equal(digest, digests[0]):
                raise EngineFailure(
                    f"vLLM: rank {rank} of an engine over {self._size} devices was given other "
                    "requests than rank 0, or drew other tokens"
                )

    def loaded_by_any(self, loaded: Sequence[bool]) -> list[bool]:
        """Return which of some tensors at least one rank of the engine has loaded. Collective."""
        found = torch.tensor(loaded, dtype=torch.uint8)
        try:
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._group())
        except RuntimeError as error:
            raise EngineFailure(_ENDED) from error
        return [bool(one) for one in found.tolist()]

    def leave(self) -> None:
        """End the process groups that vLLM opened."""
        of_vllm(_STATE, "destroy_model_parallel")()
        if not self._is_pool:
            of_vllm(_STATE, "destroy_distributed_environment")()

    def _group(self) -> Any:
        return of_vllm(_STATE, "get_tp_group")().cpu_group
