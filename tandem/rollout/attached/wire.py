# SPDX-License-Identifier: Apache-2.0
"""Tensors between a run and the workers of a server: whole, by their names in checkpoint files.

The bytes of a tensor follow its message (``messages``).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.rollout.attached.messages import receive_into, receive_message, send_message
from tandem.types import SliceSpec


def send_tensor(channel: socket.socket, tensor: Tensor, *, spec: SliceSpec) -> None:
    """Send a whole tensor in the dtype of ``spec``."""
    data = tensor.detach().to("cpu", spec.dtype).contiguous().view(-1).view(torch.uint8)
    send_message(channel, _described(spec))
    channel.sendall(_bytes_of(data))


def receive_tensors(channel: socket.socket) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) until the sender ends the version. A tensor has memory of its own."""
    while "name" in (message := receive_message(channel)):
        spec = _spec_of(message)
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        receive_into(channel, _bytes_of(tensor.view(-1).view(torch.uint8)))
        yield spec.name, tensor


def end_version(channel: socket.socket) -> None:
    """Tell the worker that all tensors have been sent."""
    send_message(channel, {"end": True})


def send_manifest(channel: socket.socket, manifest: Sequence[SliceSpec]) -> None:
    """Send the tensors that will come."""
    send_message(channel, {"manifest": [_described(spec) for spec in manifest]})


def receive_manifest(channel: socket.socket) -> list[SliceSpec]:
    """Wait for the tensors that will come."""
    return [_spec_of(entry) for entry in receive_message(channel)["manifest"]]


def _described(spec: SliceSpec) -> dict[str, Any]:
    dtype = str(spec.dtype).removeprefix("torch.")
    return {"name": spec.name, "dtype": dtype, "shape": list(spec.shape)}


def _spec_of(message: Mapping[str, Any]) -> SliceSpec:
    shape = tuple(int(size) for size in message["shape"])
    dtype = getattr(torch, message["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ConnectionError(f"{message['dtype']!r} is no dtype")
    return SliceSpec(message["name"], dtype, shape, (0,) * len(shape), shape)


def _bytes_of(data: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes on the CPU."""
    array: Any = data.numpy()
    return memoryview(array)
