# SPDX-License-Identifier: Apache-2.0
"""The declarations of FlagCX for ctypes against its headers (A10).

With ``FLAGCX_HEADER`` set to the path of a real flagcx.h, that header is compared, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.comm.flagcx_library import Abi
from tests.unit.comm.flagcx_header import differences

FOLDER = Path(__file__).parent
PATHS = [FOLDER / "interface_0_12.h", FOLDER / "interface_0_13.h"]
HEADERS = dict(zip(Abi, [path.read_text() for path in PATHS], strict=True))
OTHER = {Abi.HANDLER_GROUP: Abi.DEVICE_HANDLE, Abi.DEVICE_HANDLE: Abi.HANDLER_GROUP}
both_abis = pytest.mark.parametrize("abi", Abi)


@pytest.mark.parametrize(
    "path", [*PATHS, *(Path(os.environ[name]) for name in os.environ if name == "FLAGCX_HEADER")]
)
def test_a10_the_arguments_are_those_of_the_header(path: Path) -> None:
    text = path.read_text()
    abi = Abi.DEVICE_HANDLE if "flagcxDeviceHandleInit" in text else Abi.HANDLER_GROUP
    assert differences(text, abi) == []


@both_abis
def test_a10_the_interfaces_are_not_taken_for_each_other(abi: Abi) -> None:
    found = differences(HEADERS[abi], OTHER[abi])
    assert any(line.startswith("flagcxGetUniqueId: flagcxUniqueId_t") for line in found)
    assert any("HandleInit: not in the header" in line for line in found)


@both_abis
@pytest.mark.parametrize(
    ("declared", "changed", "difference"),
    [
        ("int root, ", "", "flagcxBroadcast: 6 arguments, not 7"),
        ("size_t count", "int count", "flagcxBroadcast: int at place 3, not c_ulong"),
        ("int *isHomo", "int isHomo", "flagcxIsHomoComm: int at place 2, not LP_c_int"),
        ("const char *flagcxGet", "int flagcxGet", "flagcxGetLastError: int at place 0, not c_c"),
        ("flagcxCommAbort", "flagcxCommBreak", "flagcxCommAbort: not in the header"),
        ("(*hostGetDevicePointer)(void **pDevice", "(*eventQuery)(void **pDevice", "hostGetDev"),
        (
            "flagcxResult_t (*hostGetDevicePointer)(void **pDevice, void *pHost);",
            "",
            "flagcxDeviceHandle.streamFree: the header has",
        ),
        ("(*setDevice)(int dev)", "(*setDevice)(size_t dev)", "flagcxDeviceHandle.setDevice: size"),
    ],
)
def test_a10_a_difference_is_found(abi: Abi, declared: str, changed: str, difference: str) -> None:
    assert declared in HEADERS[abi]
    found = differences(HEADERS[abi].replace(declared, changed), abi)
    assert any(difference in line for line in found), found
