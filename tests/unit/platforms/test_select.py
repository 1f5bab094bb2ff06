# SPDX-License-Identifier: Apache-2.0
"""Which platform is chosen, why, and what is said of one that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.errors import UserError
from tandem.platforms.names import VARIABLE
from tandem.platforms.record import CPU
from tandem.platforms.registry import BUILT_IN, platform_named
from tandem.platforms.select import (
    choose_platform,
    probe_all,
    resolve_dtype,
    select_platform,
)

NAMES = {
    "cuda": "cuda",
    "nvidia": "cuda",
    "rocm": "rocm",
    "amd": "rocm",
    "npu": "npu",
    "ascend": "npu",
    "huawei": "npu",
    "musa": "musa",
    "mthreads": "musa",
    "mlu": "mlu",
    "cambricon": "mlu",
    "xpu": "xpu",
    "intel": "xpu",
    "metax": "metax",
    "maca": "metax",
    "cpu": "cpu",
}
WITHOUT_DEVICES = pytest.mark.skipif(torch.accelerator.is_available(), reason="has a device")


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_a2_names_and_aliases(name: str, expected: str) -> None:
    assert platform_named(name).name == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("asend", "Did you mean ascend?"),
        ("CUDA", "Known: cuda, rocm"),
        ("", "no such platform"),
        ("gpu", "no such platform"),
    ],
)
def test_unknown_name_is_an_error_with_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        platform_named(name, key="pools.rollout.platform")
    assert str(raised.value).startswith(f"pools.rollout.platform={name!r}: ")


@WITHOUT_DEVICES
def test_the_first_that_is_found_is_chosen_and_the_reason_said() -> None:
    chosen = choose_platform("auto", {})
    assert chosen.platform is CPU
    assert chosen.reason == "trainer.device=auto, and it is the first that is found"


@pytest.fixture
def broken_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor's package that is installed and does not find its driver."""
    (tmp_path / "torch_mlu.py").write_text("raise OSError('libcndrv.so is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)


@WITHOUT_DEVICES
@pytest.mark.usefixtures("broken_extension")
def test_an_accelerator_that_is_installed_and_broken_is_not_passed_over_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        assert select_platform("auto") is CPU
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "trainer.device=auto: computing on the host, because the packages installed for other "
        "devices cannot be used (mlu: torch_mlu cannot be loaded: libcndrv.so is missing). "
        "Set trainer.device=cpu if the host is intended."
    )
    assert not choose_platform("cpu", {}).caution
    assert not choose_platform("auto", {VARIABLE: "host"}).caution


@WITHOUT_DEVICES
def test_a_plug_in_that_fails_is_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not choose_platform("auto", {}).caution
    package = tmp_path / "tenstor-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: tenstor\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[tandem.platforms]\ntenstor = nosuch:PLATFORM\n")
    monkeypatch.syspath_prepend(tmp_path)
    caution = choose_platform("auto", {}).caution
    assert "tenstor: its plug-in nosuch:PLATFORM cannot be loaded" in caution


def test_key_goes_before_environment_and_environment_before_looking() -> None:
    assert choose_platform("auto", {VARIABLE: "host"}).reason == "VERL_PLATFORM=host"
    assert choose_platform("cpu", {VARIABLE: "nonsense"}).reason == "trainer.device=cpu"
    with pytest.raises(UserError, match="VERL_PLATFORM='nonsense': there is no such platform"):
        choose_platform("auto", {VARIABLE: "nonsense"})


@WITHOUT_DEVICES
@pytest.mark.parametrize("name", ["cuda", "rocm", "metax", "npu", "musa", "mlu", "xpu"])
def test_what_is_asked_for_and_not_here_is_an_error_with_all_reasons(name: str) -> None:
    with pytest.raises(
        UserError, match=f"trainer.device='{name}': {name} cannot be used"
    ) as raised:
        choose_platform(name, {})
    assert "Name one that can: cpu" in str(raised.value)
    for probed in probe_all():
        assert not probed.problem or f"{probed.name}: {probed.problem}" in str(raised.value)


def test_every_platform_is_probed_and_the_host_last() -> None:
    probed = probe_all()
    assert [one.name for one in probed][: len(BUILT_IN) - 1] == [p.name for p in BUILT_IN[:-1]]
    assert (probed[-1].name, probed[-1].problem) == ("cpu", "")


def test_auto_is_the_platforms_own_precision() -> None:
    assert resolve_dtype("auto", CPU, key="x") is torch.float32
    assert resolve_dtype("bfloat16", CPU, key="x") is torch.bfloat16
