# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: each process computes some layers of every micro-batch of its copy of a model.

In training, a stage does one forward and one backward pass in turn (1F1B; Narayanan et al., 2021,
section 2.2), so that it keeps the activations of at most as many micro-batches as there are stages
from it to the last. Gradients add up in the order of the micro-batches, as in one process. Every
stage has the micro-batches themselves: it knows the shapes of what it receives.

Shapes: T tokens, L tokens that a process computes, D hidden, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

from tandem.models.decoder import Stage
from tandem.models.language_model import NativeModel
from tandem.types import PackedBatch


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward pass of a micro-batch."""

    index: int
    is_forward: bool


def one_forward_one_backward(rank: int, num_stages: int, *, num_batches: int) -> Iterator[Pass]:
    """Yield the passes of stage ``rank`` over ``num_batches`` micro-batches, in order."""
    num_first = min(num_stages - rank - 1, num_batches)
    for index in range(num_first):
        yield Pass(index, is_forward=True)
    for index in range(num_batches - num_first):
        yield Pass(num_first + index, is_forward=True)
        yield Pass(index, is_forward=False)
    for index in range(num_batches - num_first, num_batches):
        yield Pass(index, is_forward=False)


@dataclass(frozen=True, slots=True)
class StageGroups:
    """The processes that compute the stages of the same micro-batches, in the order of the stages.

    Activations and gradients have a group each. With one group, NCCL would compute all transfers in
    the order of the calls: two stages that send to each other would wait without an end.
    """

    forward: ProcessGroup
    backward: ProcessGroup


class Pipeline:
    """A stage among its peers. All of them call the same methods with the same micro-batches.

    Args:
        model: the part of the model that this stage computes.
    """

    def __init__(self, model: NativeModel, stage: Stage, *, groups: StageGroups) -> None:
        self.stage = stage
        self._model = model
        self._groups = groups
        self._sent: list[tuple[Work, Tensor]] = []

    def run(self, batches: Sequence[PackedBatch], finish: Callable[[int, Tensor], None]) -> None:
        """Compute the forward passes. ``finish(index, h_LD)`` takes what a stage has computed: the
        hidden states at the last one, the residual stream at the others.
        """
        for index, batch in enumerate(batches):
            h_LD = self._model.hidden(batch, self._receive_stream(batch))
            if not self.stage.is_last:
                self._send(h_LD, self.stage.rank + 1, group=self._groups.forward)
            finish(index, h_LD)
        self._wait()

    def train(
        self,
        batches: Sequence[PackedBatch],
        finish: Callable[[int, Tensor], Tensor],
        *,
        announce_backward: Callable[..., None],
    ) -> None:
        """Compute all passes.

        Args:
            finish: called as ``finish(index, h_LD)`` after a forward pass. At the last stage
                ``h_LD`` are the hidden states, of which it returns the loss; at the others it is
                the residual stream, which it returns.
            announce_backward: called as ``announce_backward(is_last=...)`` before each backward
                pass.
        """
        rank, size = self.stage.rank, self.stage.size
        kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        for step in one_forward_one_backward(rank, size, num_batches=len(batches)):
            if step.is_forward:
                received = self._receive_stream(batches[step.index])
                hidden = self._model.hidden(batches[step.index], received)
                result = finish(step.index, hidden)
                if not self.stage.is_last:
                    self._send(result.detach(), rank + 1, group=self._groups.forward)
                kept[step.index] = received, result
                continue
            received, result = kept.pop(step.index)
            announce_backward(is_last=step.index == len(batches) - 1)
            if self.stage.is_last:
                result.backward()
            else:
                gradient = torch.empty_like(result)
                distributed.recv(gradient, group=self._groups.backward, group_src=rank + 1)
                result.backward(gradient)
            if received is not None:
                assert received.grad is not None, "the layers of a stage read what it received"
                self._send(received.grad, rank - 1, group=self._groups.backward)
        self._wait()

    def to_first(self, tensor: Tensor) -> Tensor | None:
        """Send a tensor of the last stage to the first. Return it there, and None elsewhere.

        The first stage passes a tensor of the same shape, whose values it ignores.
        """
        return self._pass_over(tensor, source=self.stage.size - 1, target=0)

    def to_last(self, tensor: Tensor) -> Tensor | None:
        """Send a tensor of the first stage to the last, like ``to_first``."""
        return self._pass_over(tensor, source=0, target=self.stage.size - 1)

    def _pass_over(self, tensor: Tensor, *, source: int, target: int) -> Tensor | None:
        group = self._groups.forward
        if self.stage.rank == source:
            distributed.send(tensor.contiguous(), group=group, group_dst=target)
        elif self.stage.rank == target:
            received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            distributed.recv(received, group=group, group_src=source)
            return received
        return None

    def _receive_stream(self, batch: PackedBatch) -> Tensor | None:
        if self.stage.is_first:
            return None
        num_peers = self._model.layout.sequence.size
        rows = -(-len(batch.token_ids_T) // num_peers)
        columns = self._model.decoder.config.hidden_size
        # As in one process, the stream is at least fp32.
        wide = torch.promote_types(self.stage.compute, torch.float32)
        stream_LD = torch.empty(rows, columns, dtype=wide, device=self._model.device)
        distributed.recv(stream_LD, group=self._groups.forward, group_src=self.stage.rank - 1)
        return stream_LD.requires_grad_(torch.is_grad_enabled())

    def _send(self, tensor: Tensor, rank: int, *, group: ProcessGroup) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        tensor = tensor.contiguous()
        work = distributed.isend(tensor, group=group, group_dst=rank)
        assert work is not None, "a stage belongs to the group of its stages"
        self._sent.append((work, tensor))

    def _wait(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
