# SPDX-License-Identifier: Apache-2.0
"""A double of vLLM's server with tandem's plug-in: the routes that a run uses, over a tiny model of
our decoder, in threads of this process.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.models.folder import open_model
from tandem.rollout.attached.messages import receive_message, send_message
from tandem.rollout.attached.plugin import UpdateState, describe_model, stream_of
from tandem.rollout.attached.protocol import BACKEND, LOGPROBS_MODE, PROCESSOR
from tandem.rollout.attached.wire import receive_manifest, receive_tensors
from tandem.rollout.feed import checkpoint_views
from tandem.rollout.keyed_random import uniforms
from tandem.rollout.packing import pack
from tandem.rollout.sampler import draw_rows
from tandem.types import PackedBatch

_BOUNDS = ("/start_weight_update", "/finish_weight_update")


class _Params:
    """The sampling parameters of a request, as the plug-in sees them."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.extra_args = given["extra_args"]


class VllmServerDouble:
    """A server that listens on a port of this machine, from when it is made until ``kill``.

    Attributes:
        info: what it answers to ``/server_info``.
        hf_config: the config.json that it says to have.
        scales_out, is_developed, is_second: whether it was started with ``--enable-scale-out``,
            with the routes for training, and with vLLM's second model runner.
        asks_key: the paths that want an API key, by their beginning; "" for none.
        is_half: whether a version of weights has not arrived whole.
        is_started: whether an update was started and not finished.
        dtype: the precision in which it says to compute.
        version: what it answers to ``/version``.
        step_s: the time of a token.
        wrong: a tensor of which it keeps the old values when weights come.
        dies_in: the path of the next request in which it is killed.
        is_deaf: whether it answers nothing.
        salts: the salts of the requests so far.
        num_tokens: the tokens drawn so far.
    """

    def __init__(self, folder: Path, *, port: int = 0, **settings: Any) -> None:
        self._model = open_model(str(folder), dtype=torch.float32, device="cpu", random_seed=99)
        self._model.module.requires_grad_(False)
        self.hf_config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.info: dict[str, Any] = {
            "model_config": {
                "dtype": "torch.float32",
                "max_model_len": 128,
                "logprobs_mode": LOGPROBS_MODE,
                "logits_processors": [PROCESSOR],
            },
            "scheduler_config": {"max_num_seqs": 64, "async_scheduling": False},
            "weight_transfer_config": {"backend": BACKEND},
            "speculative_config": None,
        }
        self.version, self.step_s, self.wrong, self.dies_in = "0.32.0", 0.0, "", ""
        self.asks_key = ""
        self.scales_out = self.is_developed = True
        self.is_second = self.is_half = self.is_started = False
        self.dtype = torch.float32
        self.is_deaf = self.is_dead = False
        self.salts: list[str] = []
        self.num_tokens = 0
        self._label, self._is_paused = "default", False
        self._changes = threading.Condition()
        self._connections: list[socket.socket] = []
        double = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                double._serve(self)

            do_POST = do_GET

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        for name, value in settings.items():
            setattr(self, name, value)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """End all connections at once, and refuse new ones."""
        if self.is_dead:
            return
        self.is_dead = True
        self._http.shutdown()
        self._http.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._changes:
            self._changes.notify_all()

    def pause(self, is_paused: bool = True) -> None:
        """Do what somebody else's request does."""
        with self._changes:
            self._is_paused = is_paused
            self._changes.notify_all()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        self._connections.append(handler.connection)
        target = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else {}
        if target.path == self.dies_in:
            self.dies_in = ""
            threading.Thread(target=self.kill, daemon=True).start()
        while self.is_deaf or (self.dies_in == "" and self.is_dead):
            time.sleep(0.01)
            if self.is_dead:
                return
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        if self.asks_key and target.path.startswith(self.asks_key):
            status, content = 401, {"error": "Unauthorized"}
        else:
            status, content = self._answer(target.path, body, query)
        data = json.dumps(content).encode()
        with suppress(OSError):
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)

    def _answer(self, path: str, body: dict[str, Any], query: dict[str, str]) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/health":
            return 200, None
        if path.startswith("/inference/"):
            if not self.scales_out:
                return 403, {"error": {"message": "Scale-out endpoints are disabled"}}
            return (200, self._generate(body)) if path.endswith("generate") else (200, None)
        if not self.is_developed:
            return 404, {"detail": "Not Found"}
        answers: dict[str, Any] = {
            "/server_info": {"vllm_config": self.info},
            "/get_world_size": {"world_size": 1},
            "/weight_info": {"weight_version": self._label},
            "/is_paused": {"is_paused": self._is_paused},
            "/reset_prefix_cache": {"success": True},
        }
        if self.is_started is (path == "/start_weight_update") and path in _BOUNDS:
            return 400, {"detail": "an update has been started, or none has"}
        self._change(path, body)
        if path == "/init_weight_transfer_engine":
            model = SimpleNamespace(hf_config=SimpleNamespace(**self.hf_config), dtype=self.dtype)
            vllm_config = SimpleNamespace(model_config=model, use_v2_model_runner=self.is_second)
            state = UpdateState(is_open=self.is_half, is_started=self.is_started)
            describe_model(vllm_config, state, **body["init_info"])
        if path == "/update_weights":
            error = self._receive(**body["update_info"])
            return (500, {"detail": error}) if error else (200, {})
        return 200, answers.get(path, {})

    def _change(self, path: str, body: dict[str, Any]) -> None:
        """Change what a route of the control of updates changes."""
        with self._changes:
            if path in ("/pause", "/resume"):
                self._is_paused = path == "/pause"
                self._changes.notify_all()
            elif path in _BOUNDS:
                self.is_started = path == "/start_weight_update"
                self._label = body.get("weight_version", self._label)

    def _receive(self, address: str, port: int, token: str) -> str | None:
        with socket.create_connection((address, port)) as channel:
            send_message(channel, {"token": token})
            missing = {spec.name for spec in receive_manifest(channel)}
            receive_message(channel)
            send_message(channel, {"ready": True})
            views = dict(checkpoint_views(self._model))
            for name, tensor in receive_tensors(channel):
                missing.remove(name)
                if name != self.wrong:
                    views[name].copy_(tensor)
            error = f"vLLM: weights are missing: {sorted(missing)}" if missing else None
            send_message(channel, {"error": error})
        return error

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        params, prompt = body["sampling_params"], body["token_ids"]
        self.salts.append(body["cache_salt"])
        stream = stream_of(_Params(params))
        assert stream is not None and params["temperature"] == 0 and params["ignore_eos"]
        tokens: list[int] = []
        entries: list[dict[str, float]] = []
        spans: list[dict[str, Any]] = []
        while len(tokens) < params["max_tokens"]:
            with self._changes:
                self._changes.wait_for(lambda: not self._is_paused or self.is_dead)
                if self.is_dead:
                    return {}
                forced = {0: stream.forced[len(tokens)]} if stream.forced else {}
                draw = draw_rows(
                    self._logits(prompt + tokens),
                    uniforms(torch.tensor([stream.key]), torch.tensor([[len(tokens)]]))[:, 0],
                    rules=[stream.rule],
                    forced=forced,
                )
                if not spans or spans[-1]["version"] != self._label:
                    spans.append({"version": self._label, "start": len(tokens)})
                self.num_tokens += 1
            tokens.append(int(draw.token_B))
            entries.append({"logprob": float(draw.logp_B)})
            if tokens[-1] in params["stop_token_ids"]:
                break
            time.sleep(self.step_s)
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": entries},
            "weight_versions": spans,
            "finish_reason": "stop",
        }
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}

    def _logits(self, token_ids: list[int]) -> Tensor:
        packed = pack([token_ids], [0], prefix_starts=[0], device=torch.device("cpu"))
        last_R = torch.tensor([len(token_ids) - 1])
        batch = PackedBatch(
            token_ids_T=packed.token_T,
            position_ids_T=packed.position_T,
            segments=packed.segments,
            source_R=last_R,
            target_R=last_R,
            sequence_R=torch.zeros_like(last_R),
            num_sequences=1,
        )
        return F.linear(self._model.hidden(batch)[last_R], self._model.lm_head_weight)
