# SPDX-License-Identifier: Apache-2.0
"""A ctypes binding of the FlagCX library (https://github.com/flagos-ai/FlagCX).

The exported functions identify the binary interface, because the version function returns the same
number in every release. A function is looked up when it is called, so a library without it fails
only then.
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
"""FlagCX's code of uint8. All tensors are sent as bytes, because FlagCX lacks some types."""

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
"""The result codes. The library's own function returns ``_NO_TEXT`` for all of them."""
_NO_TEXT = "Not implemented."


class Abi(Enum):
    """The binary interfaces of FlagCX."""

    HANDLER_GROUP = "up to 0.12"
    """One structure contains all handles, and the library allocates ids."""
    DEVICE_HANDLE = "from 0.13"
    """There is only a device handle, and the caller allocates ids."""


class UniqueId(ctypes.Structure):
    """The id by which the ranks of a communicator find each other."""

    _fields_ = (("internal", c_ubyte * ID_BYTES),)


class DeviceHandle(ctypes.Structure):
    """The first entries of the table of device functions, the same in both interfaces."""

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
    """The structure of all handles of ``Abi.HANDLER_GROUP``."""

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
"""The argument types of each called function."""
RETURNS: Mapping[str, Any] = {"flagcxGetLastError": c_char_p}
"""The return types of the functions that do not return a result code."""


class FlagcxLibrary:
    """The loaded library.

    Every method raises ``GroupError`` with the library's reason if it fails, and ``UserError`` if
    the library does not export a function.
    """

    def __init__(self, path: Path) -> None:
        """Load the library. Callers use ``load_library``."""
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise UserError(
                "flagcx",
                str(path),
                rule=f"cannot be loaded ({error})",
                remedy="Install the libraries that it was built with, or set FLAGCX_PATH to "
                "a different build.",
            ) from error
        self.abi = self._find_abi()
        self._device: Any = self._open_device()

    def vendor(self) -> str:
        """Return the device vendor of this build, such as ``NVIDIA``."""
        name = ctypes.create_string_buffer(ID_BYTES)
        self._check("getVendor", self._device.getVendor(name))
        return name.value.decode()

    def use_device(self, index: int) -> None:
        """Select the device of the calling thread; call it before ``connect``."""
        self._check("setDevice", self._device.setDevice(index))

    def make_id(self) -> bytes:
        """Return a new id for one communicator, of ``ID_BYTES`` bytes."""
        made = UniqueId()
        if self.abi is Abi.DEVICE_HANDLE:
            self._call("flagcxGetUniqueId", ctypes.byref(made))
            return bytes(made)
        pointer = POINTER(UniqueId)()
        self._call("flagcxGetUniqueId", ctypes.byref(pointer))
        return bytes(pointer.contents)  # never freed: the library has no function for it

    def connect(self, unique_id: bytes, *, rank: int, size: int) -> int:
        """Return a communicator of ``size`` ranks. Block without limit until all ranks call it."""
        communicator = c_void_p()
        own_id = UniqueId.from_buffer_copy(unique_id)
        self._call(
            "flagcxCommInitRank", ctypes.byref(communicator), size, ctypes.byref(own_id), rank
        )
        return communicator.value or 0

    def is_homogeneous(self, communicator: int) -> bool:
        """Return whether all ranks have devices of one vendor."""
        answer = c_int()
        self._call("flagcxIsHomoComm", communicator, ctypes.byref(answer))
        return bool(answer.value)

    def broadcast(
        self, communicator: int, address: int, *, num_bytes: int, root: int, stream: int
    ) -> None:
        """Broadcast in place on a stream of ``copy_stream``; may block until all ranks call it."""
        arguments = (address, address, num_bytes, UINT8, root, communicator, stream)
        self._call("flagcxBroadcast", *arguments, communicator=communicator)

    def abort(self, communicator: int) -> None:
        """Cancel the pending work of a homogeneous communicator."""
        self._call("flagcxCommAbort", communicator)

    def destroy(self, communicator: int) -> None:
        """Free a communicator; may block without limit until all ranks call it."""
        self._call("flagcxCommDestroy", communicator)

    def copy_stream(self, handle: int) -> int:
        """Return the library's stream for a device's stream. Free it with ``free_stream``."""
        stream = c_void_p()
        self._check("streamCopy", self._device.streamCopy(ctypes.byref(stream), handle))
        return stream.value or 0

    def free_stream(self, stream: int) -> None:
        """Free a stream of the library, not the device's own stream."""
        self._check("streamFree", self._device.streamFree(stream))

    def _find_abi(self) -> Abi:
        if hasattr(self._library, "flagcxDeviceHandleInit"):
            return Abi.DEVICE_HANDLE
        if not hasattr(self._library, "flagcxHandleInit"):
            raise self._unsupported("exports no function that makes a handle")
        # FlagCX 0.5 added this function and the current order of the table of device functions.
        if not hasattr(self._library, "flagcxCommRegister"):
            raise self._unsupported("is older than 0.5")
        return Abi.HANDLER_GROUP

    def _unsupported(self, reason: str) -> UserError:
        return UserError(
            "flagcx",
            str(self.path),
            rule=f"{reason} and is not supported",
            remedy="Install FlagCX 0.5 or later.",
        )

    def _open_device(self) -> Any:
        """Return the table of device functions, which lives as long as the process."""
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
                "flagcx",
                str(self.path),
                rule=f"does not export {name}",
                remedy="Install FlagCX 0.5 or later.",
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
        """Return the vendor library's text of the last error, or ""."""
        if not communicator or not hasattr(self._library, "flagcxGetLastError"):
            return ""
        text = (self._function("flagcxGetLastError")(communicator) or b"").decode(errors="replace")
        return "" if text in ("", _NO_TEXT) else f": {text}"


@cache
def load_library(path: Path) -> FlagcxLibrary:
    """Load the library once per process.

    Raises:
        UserError: the library cannot be loaded, or its interface is not supported.
    """
    return FlagcxLibrary(path)


def find_library(environment: Mapping[str, str]) -> Path:
    """Return the path of the library.

    It is searched under ``FLAGCX_PATH`` (an installation or a source tree with a build) if that is
    set, else in FlagCX's Python package, else in the build folder of the package's source.

    Raises:
        UserError: there is no library.
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
        "FLAGCX_PATH",
        root or "",
        rule=f"FlagCX is not installed there ({looked})",
        remedy=f"Install FlagCX and set FLAGCX_PATH to the folder that contains lib/{LIBRARY}.",
    )


def _beside_package() -> list[Path]:
    spec = find_spec("flagcx")  # does not import the package, which would change torch.distributed
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    built = [folder.parents[2] / "build" / "lib" for folder in folders if len(folder.parents) > 2]
    return [folder / LIBRARY for folder in (*folders, *built)]
