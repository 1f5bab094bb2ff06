# SPDX-License-Identifier: Apache-2.0
"""The program of the child process that holds SGLang's engine, in SGLang's own interpreter.

It answers one call at a time with one line of JSON. While sequences are generated it writes lines
that say so, from which the parent knows that nothing hangs. Between two calls generation is paused.
SGLang's schedulers, one for each device, are children of this process and in the same process
group: the end of the parent, of this process or of a scheduler ends all of them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from functools import partial
from multiprocessing import connection, util
from pathlib import Path
from typing import Any

import torch

from tandem.children.child import encode_line, open_channel, receive_all, receive_first
from tandem.rollout.sglang.scheduler import (
    ACCOUNT_BYTES,
    FIRST,
    LAST,
    LOADER,
    of_sglang,
    register_sampler,
    run_scheduler,
)

_STREAM_TOKENS = 8
"""The number of tokens after which a sequence reports."""
_BEAT_S = 1.0
"""The shortest time between two lines that report progress."""


def main(channel_fd: int, lifeline_fd: int) -> None:
    """Start SGLang's engine with the arguments of the first message, and answer calls."""
    channel = open_channel(channel_fd, lifeline_fd)
    first = json.loads(receive_first(channel))
    gc.disable()  # SGLang's modules are a million objects and no garbage
    try:
        program = Program(channel, first)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        channel.sendall(encode_line({"error": first_line(error)}))
        return
    gc.freeze()
    gc.enable()
    threading.Thread(target=_end_with_schedulers, daemon=True).start()
    channel.sendall(encode_line({"result": program.describe()}))
    for message in receive_all(channel):
        call = json.loads(message)
        try:
            result = program.run(call["call"], call["arguments"])
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            channel.sendall(encode_line({"error": first_line(error)}))
        else:
            channel.sendall(encode_line({"result": result}))
    program.close()


def first_line(error: Exception) -> str:
    """Return an error in one line, with its kind."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class Program:
    """SGLang's engine with the calls of the parent.

    Args:
        first: ``arguments`` of ServerArgs, ``config`` (the content of config.json, or None for that
            of the model's folder), ``num_rows`` of samples, ``weights_fd`` (the shared memory that
            weights come in) and its size ``weights_bytes``, and ``folder``, which the parent
            removes in the end.
    """

    def __init__(self, channel: socket.socket, first: dict[str, Any]) -> None:
        self._channel = channel
        _place_listener(first["folder"])
        register_sampler()
        arguments = first["arguments"]
        forks, store = arguments["device"] == "cpu", f"{first['folder']}/world"
        engine_class = _engine_class(channel, forks=forks, store=store)
        tempfile.tempdir = first["folder"]  # SGLang's sockets, until the first version
        if first["config"] is not None:
            arguments["model_path"] = _write_config(first["config"], first["folder"])
        self._engine = engine_class(**arguments, custom_weight_loader=[LOADER])
        tempfile.tempdir = None
        self._manager: Any = self._engine.tokenizer_manager
        self._processor = of_sglang(
            "sampling.custom_logit_processor", "DisallowedTokensLogitsProcessor"
        ).to_str()  # SGLang keeps custom_params for requests with a processor; ours is never called
        self._memory = mmap.mmap(first["weights_fd"], first["weights_bytes"])
        self._device = arguments["device"]
        self._num_schedulers: int = arguments["tp_size"]
        self._num_rows: int = first["num_rows"]
        self._version = "-1"
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: set[asyncio.Task[dict[str, Any]]] = set()
        self._ended: list[asyncio.Task[dict[str, Any]]] = []
        self._progress = asyncio.Event()
        self._num_reports = 0
        self._is_paused = False
        self._last_beat = time.monotonic()

    def describe(self) -> dict[str, Any]:
        """Return the size of the cache in tokens."""
        (info, *_) = self._engine._scheduler_init_result.scheduler_infos
        return {"cache_tokens": info["max_total_num_tokens"]}

    def run(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run one call to its end."""
        return self._engine.loop.run_until_complete(getattr(self, f"_{name}")(**arguments))

    def close(self) -> None:
        """End the scheduler."""
        self._engine.shutdown()

    async def _add(self, samples: list[dict[str, Any]]) -> None:
        self._waiting += samples

    async def _advance(self, max_steps: int | None) -> list[dict[str, Any]]:
        """Generate until a sequence finishes, or until one has drawn ``max_steps`` tokens."""
        self._fill_rows()
        self._num_reports = 0
        max_reports = None if max_steps is None else max(1, max_steps // _STREAM_TOKENS)
        await self._resume()
        while self._running and not self._ended:
            await self._wait_for_progress()
            if max_reports is not None and self._num_reports >= max_reports * len(self._running):
                break
            self._fill_rows()
        await self._pause()
        ended, self._ended = self._ended, []
        return [task.result() for task in ended]

    async def _canary(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Generate one sample beside the others, and return it alone."""
        task = asyncio.create_task(self._generate(sample))
        await self._resume()
        while not task.done():
            await self._wait_for_progress(task)
        await self._pause()
        return task.result()

    async def _begin(self, keeps_cache: bool) -> None:
        """Open the model for new weights."""
        await self._pause(mode="in_place" if keeps_cache else "retract")
        _require(await self._manager.begin_weight_update(_request("BeginWeightUpdate"), None))
        await self._load([(FIRST, torch.zeros(1, device=self._device))])

    async def _take(self, tensors: list[dict[str, Any]]) -> None:
        """Load tensors that lie in the shared memory."""
        named = []
        for one in tensors:
            dtype, shape = getattr(torch, one["dtype"]), one["shape"]
            count = torch.Size(shape).numel()
            view = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=one["offset"])
            named.append((one["name"], view.view(shape).to(self._device, copy=True)))
        await self._load(named)

    async def _end(self, version: str, keeps_cache: bool) -> dict[str, Any]:
        """Close the model, and return the account of weights that came, over all schedulers."""
        size = (self._num_schedulers, ACCOUNT_BYTES)
        accounts = torch.zeros(size, dtype=torch.uint8, device=self._device).share_memory_()
        await self._load([(LAST, accounts)], version=version)
        _require(await self._manager.end_weight_update(_request("EndWeightUpdate"), None))
        if not keeps_cache:
            _require(await self._manager.flush_cache())
        self._version = version
        _unlink_files(self._engine.port_args)
        found = [json.loads(row.numpy().tobytes()) for row in accounts.cpu()]
        return {key: sorted({each for one in found for each in one[key]}) for key in found[0]}

    async def _load(
        self, named: list[tuple[str, torch.Tensor]], *, version: str | None = None
    ) -> None:
        request = of_sglang("managers.io_struct", "UpdateWeightsFromTensorReqInput")(
            serialized_named_tensors=self._engine._serialize_tensors_per_rank(named, None),
            load_format=LOADER,
            flush_cache=False,
            weight_version=version,
        )
        _require(await self._manager.update_weights_from_tensor(request, None))

    async def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            await self._manager.continue_generation(_request("ContinueGeneration"))

    async def _pause(self, *, mode: str = "in_place") -> None:
        self._is_paused = True
        await self._manager.pause_generation(_request("PauseGeneration", mode=mode))

    def _fill_rows(self) -> None:
        """Start samples while there are rows: a row is left for the canary."""
        while self._waiting and len(self._running) < self._num_rows:
            task = asyncio.create_task(self._generate(self._waiting.popleft()))
            self._running.add(task)
            task.add_done_callback(self._collect)

    def _collect(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._running.discard(task)
        self._ended.append(task)
        self._progress.set()

    async def _generate(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Generate one sequence.

        Args:
            sample: ``id``, ``prompt``, ``length``, ``eos`` (tokens that end it), and ``draw``, the
                row of ``scheduler.draw``.
        """
        request = of_sglang("managers.io_struct", "GenerateReqInput")(
            input_ids=sample["prompt"],
            sampling_params={
                "max_new_tokens": sample["length"],
                "ignore_eos": not sample["eos"],
                "stop_token_ids": sample["eos"],
                "no_stop_trim": True,
                "stream_interval": _STREAM_TOKENS,
                "custom_params": sample["draw"],
            },
            custom_logit_processor=self._processor,
            return_logprob=True,
            stream=True,
            extra_key=self._version,
        )
        found: dict[str, Any] = {}
        async for latest in self._manager.generate_request(request, None):
            found = latest
            self._num_reports += 1
            self._progress.set()
        facts = found["meta_info"]
        _require_finished(facts, length=sample["length"])
        log_probs, token_ids = zip(
            *((one[0], one[1]) for one in facts["output_token_logprobs"]), strict=True
        )
        versions = [
            (span["start"], int(span["version"])) for span in facts.get("weight_versions") or ()
        ]
        return {
            "id": sample["id"],
            "tokens": token_ids,
            "log_probs": log_probs,
            "versions": versions or [(0, int(self._version))],
            "cached": facts["cached_tokens"],
        }

    async def _wait_for_progress(self, task: asyncio.Task[Any] | None = None) -> None:
        """Wait until a sequence reports or finishes, or ``task`` ends; tell the parent of it."""
        waiting = asyncio.create_task(self._progress.wait())
        ends = {waiting} if task is None else {waiting, task}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self._progress.clear()
        if time.monotonic() - self._last_beat > _BEAT_S:
            self._last_beat = time.monotonic()
            self._channel.sendall(encode_line({"beat": True}))


def _engine_class(channel: socket.socket, *, forks: bool, store: str) -> Any:
    """Return the class of SGLang's engine whose schedulers draw with tandem's sampler.

    Args:
        forks: whether schedulers are forked from this process, which has imported SGLang. A fresh
            interpreter imports it again. A process that may hold a device cannot be forked.
        store: the path of the file by which the schedulers meet.
    """
    base = of_sglang("entrypoints.engine", "Engine")

    class KeyedEngine(base):
        run_scheduler_process_func = staticmethod(partial(run_scheduler, store=store))

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            if forks:
                # The parent learns of the end of this process by the end of the channel.
                os.register_at_fork(after_in_child=channel.close)
                multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(*args, **kwargs)

    return KeyedEngine


def _require_finished(facts: dict[str, Any], *, length: int) -> None:
    """Raise RuntimeError unless a sequence ended by itself or has all of its ``length`` tokens.

    SGLang aborts a sequence for which its cache has no room, or lowers its length without a word.
    """
    reason: dict[str, Any] = facts.get("finish_reason") or {}
    num_tokens = len(facts.get("output_token_logprobs") or ())
    is_whole = reason.get("type") == "length" and num_tokens == length
    if num_tokens and (is_whole or reason.get("type") == "stop"):
        return
    said = " ".join(str(reason.get("message") or reason.get("type")).split())
    raise RuntimeError(f"a sequence ended after {num_tokens} of {length} tokens ({said})")


def _request(name: str, **fields: Any) -> Any:
    return of_sglang("managers.io_struct", f"{name}ReqInput")(**fields)


def _require(answer: Any) -> None:
    """Raise RuntimeError unless SGLang says that a call succeeded."""
    if isinstance(answer, tuple):
        success, message = answer[0], answer[1] if len(answer) > 1 else ""
    else:
        success, message = answer.success, answer.message
    if not success:
        raise RuntimeError(message)


def _write_config(config: dict[str, Any], folder: str) -> str:
    """Write a config.json, and return the folder that has it."""
    model = Path(folder) / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(model)


def _place_listener(folder: str) -> None:
    """Place the socket by which multiprocessing shares tensors, which is needed to the end."""
    tempfile.tempdir = folder
    util.get_temp_dir()
    tempfile.tempdir = None


def _unlink_files(ports: Any) -> None:
    """Remove the names of SGLang's sockets and of its shared memory, which all processes have open.

    SGLang never removes them, and none of these processes lives to do it.
    """
    sockets = (
        ports.tokenizer_ipc_name,
        ports.scheduler_input_ipc_name,
        ports.detokenizer_ipc_name,
        ports.rpc_ipc_name,
        ports.metrics_ipc_name,
    )
    loads = of_sglang("managers.load_snapshot", "shm_path_for")(ports.instance_id)
    for path in (*(name.removeprefix("ipc://") for name in sockets), loads):
        Path(path).unlink(missing_ok=True)


def _end_with_schedulers() -> None:
    """End the process group as soon as a scheduler has ended, for whatever reason."""
    sentinels = [child.sentinel for child in multiprocessing.active_children()]
    connection.wait(sentinels)
    os.killpg(os.getpgrp(), signal.SIGKILL)
