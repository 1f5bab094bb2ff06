# SPDX-License-Identifier: Apache-2.0
"""FlagCX's library through ctypes, against the stub in both binary interfaces (A9)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.comm.deadline import GroupError
from tandem.comm.flagcx_library import ID_BYTES, LIBRARY, Abi, find_library, load_library
from tandem.errors import UserError
from tandem.testing.flagcx_stub import counters, stub_library

pytestmark = pytest.mark.usefixtures("flagcx_stub")
both_abis = pytest.mark.parametrize("abi", Abi)


@both_abis
def test_a9_the_interface_is_told_by_what_the_library_exports(abi: Abi) -> None:
    library = load_library(stub_library(abi))
    assert library.abi is abi
    assert load_library(stub_library(abi)) is library, "loaded once"


@both_abis
def test_a9_a_communicator_of_one(abi: Abi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGCX_STUB_VENDOR", "MUSA")
    library = load_library(stub_library(abi))
    assert library.vendor() == "MUSA"
    unique_id = library.make_id()
    assert len(unique_id) == ID_BYTES
    assert unique_id != library.make_id()
    library.use_device(0)
    communicator = library.connect(unique_id, rank=0, size=1)
    assert library.is_homogeneous(communicator)
    library.abort(communicator)
    library.destroy(communicator)


@both_abis
def test_a9_streams_are_copied_and_freed(abi: Abi) -> None:
    path = stub_library(abi)
    library = load_library(path)
    copied, freed = counters(path)
    stream = library.copy_stream(4711)
    assert stream not in (0, 4711)
    library.free_stream(stream)
    assert counters(path) == (copied + 1, freed + 1)


@both_abis
@pytest.mark.parametrize(
    ("result", "text"),
    [
        (1, "unhandled device error"),
        (2, "system error"),
        (3, "internal error"),
        (4, "invalid argument"),
        (5, "invalid usage"),
        (6, "remote error"),
        (7, "in progress"),
        (8, "unhandled error of the vendor's library"),
        (9, "not supported"),
        (10, "unknown"),
        (77, "unknown"),
        (-1, "unknown"),
    ],
)
def test_a9_error_codes_become_exceptions_with_text(
    abi: Abi, result: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_library(stub_library(abi))
    monkeypatch.setenv("FLAGCX_STUB_FAIL", f"flagcxGetUniqueId:{result}")
    with pytest.raises(GroupError) as raised:
        library.make_id()
    assert str(raised.value) == f"flagcxGetUniqueId: {text} (FlagCX result {result})"
    for function, call in {
        "getVendor": library.vendor,
        "setDevice": lambda: library.use_device(0),
        "streamCopy": lambda: library.copy_stream(1),
        "streamFree": lambda: library.free_stream(0),
        "flagcxCommInitRank": lambda: library.connect(bytes(ID_BYTES), rank=0, size=1),
        "flagcxIsHomoComm": lambda: library.is_homogeneous(0),
        "flagcxCommAbort": lambda: library.abort(0),
        "flagcxCommDestroy": lambda: library.destroy(0),
        "flagcxBroadcast": lambda: library.broadcast(0, 0, num_bytes=0, root=0, stream=0),
    }.items():
        monkeypatch.setenv("FLAGCX_STUB_FAIL", f"{function}:{result}")
        with pytest.raises(GroupError, match=rf"^{function}: {text} \(FlagCX result {result}\)$"):
            call()


@both_abis
def test_a9_the_vendors_own_words_are_added(abi: Abi, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library(stub_library(abi))
    library.use_device(0)
    communicator = library.connect(library.make_id(), rank=0, size=1)
    monkeypatch.setenv("FLAGCX_STUB_FAIL", "flagcxBroadcast:8")
    with pytest.raises(GroupError, match=r"\(FlagCX result 8\): the vendor's own words$"):
        library.broadcast(communicator, 0, num_bytes=0, root=0, stream=0)


@both_abis
@pytest.mark.parametrize(
    "missing", ["flagcxBroadcast", "flagcxCommAbort", "flagcxCommDestroy", "flagcxIsHomoComm"]
)
def test_a9_a_missing_symbol_fails_only_what_needs_it(abi: Abi, missing: str) -> None:
    library = load_library(stub_library(abi, without=(missing,)))
    library.use_device(0)
    communicator = library.connect(library.make_id(), rank=0, size=1)
    calls = {
        "flagcxBroadcast": lambda: library.broadcast(
            communicator, 0, num_bytes=0, root=0, stream=0
        ),
        "flagcxIsHomoComm": lambda: library.is_homogeneous(communicator),
        "flagcxCommAbort": lambda: library.abort(communicator),
        "flagcxCommDestroy": lambda: library.destroy(communicator),
    }
    for name, call in calls.items():
        if name != missing:
            call()
    with pytest.raises(UserError, match=rf"^flagcx=.*{LIBRARY}.*does not export {missing}\. "):
        calls[missing]()


def test_a9_a_library_of_an_unknown_version_is_refused() -> None:
    without = ("flagcxDeviceHandleInit", "flagcxHandleInit")
    with pytest.raises(UserError, match="exports no function that makes a handle.*Install FlagCX"):
        load_library(stub_library(Abi.DEVICE_HANDLE, without=without))
    with pytest.raises(UserError, match="is older than 0.5"):
        load_library(stub_library(Abi.HANDLER_GROUP, without=("flagcxCommRegister",)))


def test_a9_a_library_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^flagcx=.*absent\.so.*cannot be loaded"):
        load_library(tmp_path / "absent.so")
    text = tmp_path / LIBRARY
    text.write_text("no library")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_library(text)


def test_a9_the_library_is_searched_for_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "source" / "plugin" / "torch" / "flagcx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    root = tmp_path / "root"
    environment = {"FLAGCX_PATH": str(root)}
    with_path = [root / "build" / "lib" / LIBRARY, root / "lib" / LIBRARY]
    with pytest.raises(UserError, match=f"FLAGCX_PATH='{root}': .*{with_path[1]}, {with_path[0]}"):
        find_library(environment)
    with pytest.raises(UserError, match=r"^FLAGCX_PATH='': .*no Python package of that name"):
        find_library({})

    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    for path in (tmp_path / "source" / "build" / "lib" / LIBRARY, package / LIBRARY):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert find_library({}) == path
        with pytest.raises(UserError, match="FLAGCX_PATH"):
            find_library(environment)
    for path in with_path:
        path.parent.mkdir(parents=True)
        path.touch()
        assert find_library(environment) == path
