# SPDX-License-Identifier: Apache-2.0
"""Servers that cannot generate for a run: one line, before weights are read."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config.schema.rollout import EngineKwargs, RolloutConfig
from tandem.errors import UserError
from tandem.rollout.attached.choice import require_servers
from tandem.rollout.attached.fit import CANARY_LENGTH
from tandem.rollout.attached.keys import Share
from tandem.rollout.canary import CANARY_LENGTH as OF_CANARY
from tests.fakes.vllm_server import VllmServerDouble

URLS = "actor_rollout_ref.rollout.engine_kwargs.vllm.urls"


@pytest.fixture
def server(folder: Path) -> Iterator[VllmServerDouble]:
    server = VllmServerDouble(folder)
    yield server
    server.kill()


def _require(
    folder: Path, given: Mapping[str, Any], *, length: int = 100, num_ranks: int = 1, **keys: Any
) -> None:
    config = RolloutConfig(
        name="vllm", max_num_seqs=4, engine_kwargs=EngineKwargs(vllm=dict(given)), **keys
    )
    hf_config = json.loads((folder / "config.json").read_text())
    require_servers(config, hf_config, max_length=length, num_ranks=num_ranks)


def _changed(section: str, name: str, value: object) -> Callable[[VllmServerDouble], None]:
    return lambda server: server.info[section].update({name: value})


def _set(name: str, value: object) -> Callable[[VllmServerDouble], None]:
    return lambda server: setattr(server, name, value)


def test_a_server_that_fits_is_accepted(folder: Path, server: VllmServerDouble) -> None:
    _require(folder, {"urls": [server.url, server.url + "/"]})
    assert server.num_tokens == 0 and CANARY_LENGTH == OF_CANARY


def test_each_process_needs_a_server(folder: Path, server: VllmServerDouble) -> None:
    rule = "each of the 2 processes that generate needs a server of its own, and 1 are listed"
    with pytest.raises(UserError, match=rule):
        _require(folder, {"urls": [server.url, server.url]}, num_ranks=2)


def test_servers_that_are_added_or_left_out_change_no_other_share(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    shares = [Share({"urls": str(file)}, rank=rank, num_ranks=2) for rank in range(2)]

    def dealt(*names: str) -> list[list[str]]:
        file.write_text("".join(f"http://{name}:1\n" for name in names))
        return [[url[len("http://") : -len(":1")] for url in one.urls()] for one in shares]

    assert dealt("a", "b", "c") == [["a", "c"], ["b"]]
    assert dealt("b", "c") == [["c"], ["b"]]
    assert dealt("b", "c", "d", "e") == [["c", "e"], ["b", "d"]]
    assert dealt("a", "b", "c") == [["a", "c"], ["b"]]


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (_set("version", "0.26.0"), "it runs vLLM 0.26.0, and >=0.32,<0.33 is supported"),
        (_set("is_developed", False), "its routes for training are off"),
        (_set("scales_out", False), "it takes no token ids as prompts"),
        (_set("asks_key", "/inference/"), "it asks for an API key, and tandem sends none"),
        (_set("asks_key", "/"), "it asks for an API key, and tandem sends none"),
        (_set("is_half", True), "its model is half replaced. Start it again."),
        (lambda server: server.info.clear(), "it describes itself in a form that is not known"),
        (_set("is_second", True), "its second model runner does not let tandem draw"),
        (_changed("model_config", "logits_processors", None), "without tandem's settings"),
        (_changed("model_config", "logprobs_mode", "raw_logprobs"), "--logprobs-mode processed"),
        (_changed("scheduler_config", "async_scheduling", True), "Add --no-async-scheduling"),
        (_changed("scheduler_config", "max_num_seqs", 4), "with --max-num-seqs 5"),
        (_changed("weight_transfer_config", "backend", "nccl"), "--weight-transfer-config"),
        (_changed("model_config", "max_model_len", 99), "with --max-model-len 100"),
        (lambda server: server.info.update(speculative_config={}), "it drafts tokens"),
        (lambda server: server.info.update(kv_transfer_config={}), "a cache outside of vLLM"),
        (
            lambda server: server.info.update(cache_config={"kv_offloading_size": 4}),
            "keys and values",
        ),
        (lambda server: server.hf_config.update(hidden_size=896), "its hidden_size is 896"),
        (_set("is_deaf", True), "this server cannot be used: it does not answer"),
        (VllmServerDouble.kill, "this server cannot be used: nothing listens there"),
    ],
)
def test_a_server_that_does_not_fit_is_one_line(
    folder: Path,
    server: VllmServerDouble,
    monkeypatch: pytest.MonkeyPatch,
    *,
    spoil: Callable[[VllmServerDouble], None],
    rule: str,
) -> None:
    if rule.endswith("it does not answer"):
        monkeypatch.setattr("tandem.rollout.attached.fit.ANSWER_S", 1.0)
    spoil(server)
    with pytest.raises(UserError) as caught:
        _require(folder, {"urls": server.url})
    assert str(caught.value).startswith(f"{URLS}={server.url!r}: ")
    assert rule in str(caught.value) and "\n" not in str(caught.value)


def test_servers_compute_in_one_precision(folder: Path, server: VllmServerDouble) -> None:
    other = VllmServerDouble(folder, dtype=torch.bfloat16)
    try:
        with pytest.raises(UserError, match="computes in bfloat16, and the first server in float3"):
            _require(folder, {"urls": [server.url, other.url]})
    finally:
        other.kill()


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"urls": []}, "it lists no server"),
        ({"urls": "missing.txt"}, "this file of URLs cannot be read (No such file or directory)"),
        ({"urls": ["host:8000"]}, "it is not a URL with a port"),
        ({"urls": ["http://host"]}, "it is not a URL with a port"),
        ({"urls": ["http://10.0.0.9:80O0"]}, "it is not a URL with a port"),
        ({"urls": ["http://[::1:8000"]}, "it is not a URL with a port"),
        ({"urls": ["http://a..b:8000"]}, "its host has no address"),
        ({"urls": 8000}, "urls=8000: must be text, or a list of text"),
        ({"urls": True}, "urls=True: must be text, or a list of text"),
        ({"urls": [8000]}, "urls=[8000]: must be text, or a list of text"),
        ({"urls": ["http://8.8.8.8:1"], "allow_public": "no"}, "must be True or False"),
        ({"urls": ["http://127.0.0.1:9"], "allow_untested": "no"}, "must be True or False"),
        ({"urls": ["http://me:pw@host:1"]}, "urls='http://...@host:1': names and passwords"),
        ({"urls": ["http://8.8.8.8:8000"]}, "8.8.8.8 is a public address"),
        ({"urls": ["http://127.0.0.1:9"], "block_size": 16}, "it is an argument of their own"),
    ],
)
def test_entries_that_cannot_be_used_are_one_line(
    folder: Path, given: Mapping[str, Any], rule: str
) -> None:
    with pytest.raises(UserError) as caught:
        _require(folder, given)
    assert rule in str(caught.value) and "\n" not in str(caught.value)


def test_parallelism_belongs_to_the_server(folder: Path, server: VllmServerDouble) -> None:
    with pytest.raises(UserError, match="--tensor-parallel-size"):
        _require(folder, {"urls": server.url}, tensor_model_parallel_size=2)


def test_a_public_address_can_be_allowed(
    folder: Path, server: VllmServerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.4.4", port))]

    monkeypatch.setattr("tandem.rollout.attached.keys.socket.getaddrinfo", resolve)
    with pytest.raises(UserError, match="8.8.4.4 is a public address"):
        _require(folder, {"urls": server.url})
    monkeypatch.undo()
    _require(folder, {"urls": server.url, "allow_public": True})
