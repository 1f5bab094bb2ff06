# SPDX-License-Identifier: Apache-2.0
"""The wait for a cluster and a Ray that does not start, without either."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tandem.errors import RunFailure, UserError
from tandem.runtime import ray_cluster
from tandem.runtime.cluster import ClusterPlan, ClusterSettings
from tandem.runtime.ray_cluster import interruptible, start_ray
from tandem.runtime.ray_node import RayNodeError
from tests.fakes.patience import LIMIT_S, sooner_than


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_signals_end_what_blocks_the_main_thread_of_an_event_loop(
    number: int, error: type[BaseException]
) -> None:
    noted: list[int] = []

    async def block() -> None:
        asyncio.get_running_loop().add_signal_handler(number, noted.append, number)
        with sooner_than(), pytest.raises(error), interruptible():
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            time.sleep(LIMIT_S)
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.02)

    asyncio.run(block())
    assert noted == [number], "afterwards it is the loop's matter again"


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


KEYS = {"include_dashboard": True, "nonsense": 1}
"""An argument for ``ray start``, and one for ray.init."""


@pytest.mark.parametrize(
    ("error", "given", "line"),
    [
        (
            RayNodeError("Timed out.\n"),
            {},
            "Ray did not start on this node (Timed out). If the machine is busy, try again",
        ),
        (
            RayNodeError("Timed out.\n"),
            KEYS,
            "Ray did not start on this node (Timed out). If the machine is busy, try again; if it "
            "is not, look at ray_kwargs.ray_init",
        ),
        (
            RayNodeError("No such option: --x", is_usage=True),
            {},
            "Ray did not start on this node (No such option: --x). If the machine is busy, try "
            "again",
        ),
    ],
)
def test_a_ray_that_does_not_start_is_one_line_and_the_run_may_start_again(
    error: RayNodeError, given: dict[str, object], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "start_head", raising(error))
    plan = ClusterPlan("local", ClusterSettings(1, 2, ray_init=given))
    with pytest.raises(RunFailure) as raised:
        start_ray(ray, plan, devices=list, token="")
    assert str(raised.value) == line


@pytest.mark.parametrize("is_usage", [False, True])
def test_a_ray_that_ends_while_it_starts_is_started_once_more(
    is_usage: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def start(*_: object, role: str, token: str) -> tuple[str, str]:
        tried.append(role + token)
        if len(tried) == 1:
            raise RayNodeError("its raylet is gone", is_usage=is_usage)
        return "node", "address"

    library: Any = SimpleNamespace(
        init=lambda **_: None, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    )
    monkeypatch.setattr(ray_cluster, "start_head", start)
    plan = ClusterPlan("local", ClusterSettings(1, 2))
    if is_usage:
        with pytest.raises(RunFailure, match="its raylet is gone"):
            start_ray(library, plan, devices=list, token="t")
        assert tried == ["localt"]
    else:
        assert start_ray(library, plan, devices=list, token="t") == "node"
        assert tried == ["localt"] * 2
        (message,) = caplog.messages
        assert message.startswith("Ray did not start on this node (its raylet is gone); it is")


def test_an_option_that_ray_does_not_accept_is_an_error_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RayNodeError("Error: No such option: --x", is_usage=True)
    monkeypatch.setattr(ray_cluster, "start_head", raising(error))
    plan = ClusterPlan("local", ClusterSettings(1, 2, ray_init=KEYS))
    with pytest.raises(UserError, match=r"^ray_kwargs.ray_init=.*: Error: No such option: --x\. "):
        start_ray(ray, plan, devices=list, token="")


@pytest.mark.parametrize(
    ("error", "given", "kind"),
    [
        (ConnectionError("ray client\nis lost"), {}, RunFailure),
        (ConnectionError("ray client\nis lost"), KEYS, RunFailure),
        (RuntimeError("ray client"), {}, RunFailure),
        (TypeError("ray client"), {}, RunFailure),
        (ValueError("ray client"), {"include_dashboard": True}, RunFailure),
        (RuntimeError("ray client"), KEYS, UserError),
    ],
)
def test_a_run_that_cannot_connect_to_its_own_ray_ends_it_and_fails_in_one_line(
    error: Exception,
    given: dict[str, object],
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    node = SimpleNamespace(close=lambda: closed.append("node"))
    library: Any = SimpleNamespace(
        init=raising(error), util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    )
    monkeypatch.setattr(ray_cluster, "start_head", lambda *_, **__: (node, "address"))
    settings = ClusterSettings(1, 2, ray_init=given)
    for plan in (ClusterPlan("local", settings), ClusterPlan("head", settings, "127.0.0.1:1")):
        with pytest.raises((RunFailure, UserError), match="ray client") as raised:
            start_ray(library, plan, devices=list, token="")
        assert type(raised.value) is kind and "\n" not in str(raised.value)
    assert closed == ["node", "node"]


def test_an_interrupt_waits_for_the_end_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def connect(**_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        steps.append("connected")

    node = SimpleNamespace(close=lambda: steps.append("closed"))
    library: Any = SimpleNamespace(
        init=connect, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    )
    monkeypatch.setattr(ray_cluster, "start_head", lambda *_, **__: (node, "address"))
    plan = ClusterPlan("local", ClusterSettings(1, 2))
    with pytest.raises(KeyboardInterrupt), interruptible():
        start_ray(library, plan, devices=list, token="")
    assert steps == ["connected", "closed"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
