# SPDX-License-Identifier: Apache-2.0
"""The FlagCX library (https://github.com/flagos-ai/FlagCX) through ctypes: where it is found, which
of its two binary interfaces it has, and the calls that a group needs.

The interface is told by what the library exports, because its version function returns the same
number in every release. A function is looked up when it is called, so that a library that lacks it
fails there only. Nothing is caught to go on without: no library, no FlagCX. Not here: groups.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_void_p
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.comm.deadline import GroupError
from tandem.errors import UserError

LIBRARY = "libflagcx.so"
ID_BYTES = 256
UINT8 = 1
"""Its number of that type. All tensors travel as bytes: it has no name for some types."""

_RESULTS = (
    "success",
    "unhandled device error",
    "system error",
    "internal error",
    "invalid argument",
    "invalid usage",
    "remote error",
    "in progress",
    "unhandled error of the vendor's library",
    "not supported",
)
"""By number. Its own function for such texts answers "Not implemented." to all of them."""
_NO_TEXT = "Not implemented."


class Abi(Enum):
    """The binary interfaces that exist."""

    HANDLER_GROUP = "up to 0.12"
    """One structure for everything; the library allocates ids."""
    DEVICE_HANDLE = "from 0.13"
    """A handle of the device alone; the caller allocates ids."""


class UniqueId(ctypes.Structure):
    """What the ranks of a communicator recognize each other by."""

    _fields_ = (("internal", c_ubyte * ID_BYTES),)


class DeviceHandle(ctypes.Structure):
    """The beginning of the table of device functions, the same in both interfaces; those that are
    not called are untyped."""

    _fields_ = (
        ("deviceSynchronize", c_void_p),
        ("deviceMemcpy", c_void_p),
        ("deviceMemset", c_void_p),
        ("deviceMalloc", c_void_p),
        ("deviceFree", c_void_p),
        ("setDevice", CFUNCTYPE(c_int, c_int)),
        ("getDevice", c_void_p),
        ("getDeviceCount", c_void_p),
        ("getVendor", CFUNCTYPE(c_int, c_char_p)),
        ("hostGetDevicePointer", c_void_p),
        ("streamCreate", c_void_p),
        ("streamDestroy", c_void_p),
        ("streamCopy", CFUNCTYPE(c_int, POINTER(c_void_p), c_void_p)),
        ("streamFree", CFUNCTYPE(c_int, c_void_p)),
    )


class HandlerGroup(ctypes.Structure):
    """What ``Abi.HANDLER_GROUP`` hands out."""

    _fields_ = (
        ("uniqueId", POINTER(UniqueId)),
        ("comm", c_void_p),
        ("devHandle", POINTER(DeviceHandle)),
    )


_COMMON: Mapping[str, tuple[Any, ...]] = {
    "flagcxCommInitRank": (POINTER(c_void_p), c_int, POINTER(UniqueId), c_int),
    "flagcxIsHomoComm": (c_void_p, POINTER(c_int)),
    "flagcxBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "flagcxGetLastError": (c_void_p,),
    "flagcxCommAbort": (c_void_p,),
    "flagcxCommDestroy": (c_void_p,),
}
FUNCTIONS: Mapping[Abi, Mapping[str, tuple[Any, ...]]] = {
    Abi.HANDLER_GROUP: {
        **_COMMON,
        "flagcxHandleInit": (POINTER(POINTER(HandlerGroup)),),
        "flagcxGetUniqueId": (POINTER(POINTER(UniqueId)),),
    },
    Abi.DEVICE_HANDLE: {
        **_COMMON,
        "flagcxDeviceHandleInit": (POINTER(POINTER(DeviceHandle)),),
        "flagcxGetUniqueId": (POINTER(UniqueId),),
    },
}
"""The functions that are called, by name, with the types of their arguments."""
RETURNS: Mapping[str, Any] = {"flagcxGetLastError": c_char_p}
"""What they return where that is not a number of ``_RESULTS``."""


class FlagcxLibrary:
    """The loaded library. Every method raises ``GroupError`` with the library's reason if it fails,
    and ``UserError`` if the library does not export what it needs.

    Attributes:
        path: where it lies.
        abi: its interface.
    """

    def __init__(self, path: Path) -> None:
        """Use ``load_library``."""
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise UserError(
                f"flagcx={str(path)!r}: cannot be loaded ({error}). "
                "Install what it was built with, or set FLAGCX_PATH to another build."
            ) from error
        self.abi = self._find_abi()
        self._device: Any = self._open_device()

    def vendor(self) -> str:
        """Whose devices this build is for, such as ``NVIDIA``."""
        name = ctypes.create_string_buffer(ID_BYTES)
        self._check("getVendor", self._device.getVendor(name))
        return name.value.decode()

    def use_device(self, index: int) -> None:
        """For the calling thread, as a communicator needs before it is made."""
        self._check("setDevice", self._device.setDevice(index))

    def make_id(self) -> bytes:
        """For one communicator; ``ID_BYTES`` long."""
        made = UniqueId()
        if self.abi is Abi.DEVICE_HANDLE:
            self._call("flagcxGetUniqueId", ctypes.byref(made))
            return bytes(made)
        pointer = POINTER(UniqueId)()
        self._call("flagcxGetUniqueId", ctypes.byref(pointer))
        return bytes(pointer.contents)  # stays allocated: the library has no function to free it

    def connect(self, unique_id: bytes, *, rank: int, size: int) -> int:
        """The communicator of ``size`` ranks. Blocks until all of them call this, without end."""
        communicator = c_void_p()
        own_id = UniqueId.from_buffer_copy(unique_id)
        self._call(
            "flagcxCommInitRank", ctypes.byref(communicator), size, ctypes.byref(own_id), rank
        )
        return communicator.value or 0

    def is_homogeneous(self, communicator: int) -> bool:
        """Whether all of its ranks are of one vendor."""
        answer = c_int()
        self._call("flagcxIsHomoComm", communicator, ctypes.byref(answer))
        return bool(answer.value)

    def broadcast(
        self, communicator: int, address: int, *, num_bytes: int, root: int, stream: int
    ) -> None:
        """In place, on a stream of ``copy_stream``; may block until the others call it."""
        arguments = (address, address, num_bytes, UINT8, root, communicator, stream)
        self._call("flagcxBroadcast", *arguments, communicator=communicator)

    def abort(self, communicator: int) -> None:
        """End what is under way on the device; for homogeneous ones only."""
        self._call("flagcxCommAbort", communicator)

    def destroy(self, communicator: int) -> None:
        """May block until all ranks call this, without end."""
        self._call("flagcxCommDestroy", communicator)

    def copy_stream(self, handle: int) -> int:
        """The library's stream for a device's own one; give it back with ``free_stream``."""
        stream = c_void_p()
        self._check("streamCopy", self._device.streamCopy(ctypes.byref(stream), handle))
        return stream.value or 0

    def free_stream(self, stream: int) -> None:
        """The device's own stream remains."""
        self._check("streamFree", self._device.streamFree(stream))

    def _find_abi(self) -> Abi:
        if hasattr(self._library, "flagcxDeviceHandleInit"):
            return Abi.DEVICE_HANDLE
        if not hasattr(self._library, "flagcxHandleInit"):
            raise self._unknown("exports no function that makes a handle")
        if not hasattr(self._library, "flagcxCommRegister"):  # came with today's order of the table
            raise self._unknown("is older than 0.5, whose device functions stand in another order")
        return Abi.HANDLER_GROUP

    def _unknown(self, what: str) -> UserError:
        return UserError(
            f"flagcx={str(self.path)!r}: {what}: a version that is not known here. "
            "Install FlagCX 0.5 or later."
        )

    def _open_device(self) -> Any:
        """The table of device functions; it lives as long as the process."""
        if self.abi is Abi.DEVICE_HANDLE:
            device = POINTER(DeviceHandle)()
            self._call("flagcxDeviceHandleInit", ctypes.byref(device))
            return device.contents
        group = POINTER(HandlerGroup)()
        self._call("flagcxHandleInit", ctypes.byref(group))
        return group.contents.devHandle.contents

    def _call(self, name: str, *arguments: Any, communicator: int = 0) -> None:
        self._check(name, self._function(name)(*arguments), communicator=communicator)

    def _function(self, name: str) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise UserError(
                f"flagcx={str(self.path)!r}: does not export {name}. Install FlagCX 0.5 or later."
            ) from error
        function.argtypes = FUNCTIONS[self.abi][name]
        function.restype = RETURNS.get(name, c_int)
        return function

    def _check(self, name: str, result: int, *, communicator: int = 0) -> None:
        if result == 0:
            return
        known = _RESULTS[result] if 0 < result < len(_RESULTS) else "unknown"
        raise GroupError(f"{name}: {known} (FlagCX result {result}){self._details(communicator)}")

    def _details(self, communicator: int) -> str:
        """What the vendor's library says about the last error, if it says something."""
        if not communicator or not hasattr(self._library, "flagcxGetLastError"):
            return ""
        text = (self._function("flagcxGetLastError")(communicator) or b"").decode(errors="replace")
        return "" if text in ("", _NO_TEXT) else f": {text}"


@cache
def load_library(path: Path) -> FlagcxLibrary:
    """The library in this process; the same each time.

    Raises:
        UserError: it cannot be loaded, or its interface is not known.
    """
    return FlagcxLibrary(path)


def find_library(environment: Mapping[str, str]) -> Path:
    """Where the library lies: below ``FLAGCX_PATH`` (an installation, or its source after a build)
    if that is set, else beside FlagCX's Python package, else where its source was built.

    Raises:
        UserError: there is none.
    """
    root = environment.get("FLAGCX_PATH")
    if root:
        candidates = [Path(root) / "lib" / LIBRARY, Path(root) / "build" / "lib" / LIBRARY]
    else:
        candidates = _beside_package()
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = ", ".join(map(str, candidates)) or "no Python package of that name"
    raise UserError(
        f"FLAGCX_PATH={root or ''!r}: FlagCX is not installed there ({looked}). "
        f"Install FlagCX and set FLAGCX_PATH to the folder that holds lib/{LIBRARY}."
    )


def _beside_package() -> list[Path]:
    spec = find_spec("flagcx")  # does not import it: that would change torch.distributed
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    built = [folder.parents[2] / "build" / "lib" for folder in folders if len(folder.parents) > 2]
    return [folder / LIBRARY for folder in (*folders, *built)]
