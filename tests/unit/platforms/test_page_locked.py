# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory: its values, its registration with the driver, and its return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tandem.platforms import page_locked
from tandem.platforms.page_locked import page_locked_zeros
from tandem.platforms.record import CUDA


class Driver:
    """A stand-in for CUDA's runtime, which records what is registered."""

    def __init__(self) -> None:
        self.code = 0
        self.errors: list[int] = []
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if self.code == 0:
            self.registered[address] = num_bytes
        else:
            self.errors.append(self.code)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(page_locked, "_take_error", driver.errors.clear)
    monkeypatch.setattr(page_locked, "_CHUNK", 1000)
    monkeypatch.setattr(page_locked, "CUDA", replace(CUDA, probe=lambda: ""))
    yield driver


def test_a_cpu_has_ordinary_memory() -> None:
    zeros = page_locked_zeros(5, device_type="cpu")
    assert zeros.tolist() == [0] * 5 and zeros.dtype == torch.uint8


@pytest.mark.parametrize("num_bytes", [1, 1000, 123_456])
def test_memory_is_registered_while_a_tensor_uses_it(driver: Driver, num_bytes: int) -> None:
    zeros = page_locked_zeros(num_bytes, device_type="cuda")
    assert driver.registered == {zeros.data_ptr(): num_bytes}
    assert len(zeros) == num_bytes and zeros.dtype == torch.uint8
    assert not zeros.count_nonzero()
    part = zeros[:1].fill_(7)
    del zeros
    assert len(driver.registered) == 1 and part.item() == 7
    del part
    assert driver.registered == {}


def test_memory_that_the_driver_refuses_is_not_unregistered(driver: Driver) -> None:
    driver.code = 801
    memory = page_locked._Registered(4096)
    assert not memory.is_registered and driver.errors == []
    del memory
    assert driver.registered == {}


@pytest.mark.parametrize("problem", ["refused", "missing"])
def test_torch_allocates_where_no_memory_is_registered(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    driver.code = 801
    if problem == "missing":
        monkeypatch.setattr(page_locked, "_Registered", missing)
    asked = []
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: asked.append((sizes, options)))
    page_locked_zeros(4096, device_type="cuda")
    assert asked == [((4096,), {"dtype": torch.uint8, "pin_memory": True})]
