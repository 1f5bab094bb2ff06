# SPDX-License-Identifier: Apache-2.0
"""Compares what tandem tells ctypes about FlagCX with what one of its headers declares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from tandem.comm.flagcx_library import (
    FUNCTIONS,
    RETURNS,
    Abi,
    DeviceHandle,
    HandlerGroup,
    UniqueId,
)

TYPES: dict[str, Any] = {
    "int": c_int,
    "int*": POINTER(c_int),
    "size_t": c_size_t,
    "char*": c_char_p,
    "void*": c_void_p,
    "flagcxResult_t": c_int,
    "flagcxDataType_t": c_int,
    "flagcxComm_t": c_void_p,
    "flagcxComm_t*": POINTER(c_void_p),
    "flagcxStream_t": c_void_p,
    "flagcxStream_t*": POINTER(c_void_p),
    "flagcxUniqueId_t": POINTER(UniqueId),
    "flagcxUniqueId_t*": POINTER(POINTER(UniqueId)),
    "flagcxDeviceHandle_t": POINTER(DeviceHandle),
    "flagcxDeviceHandle_t*": POINTER(POINTER(DeviceHandle)),
    "flagcxHandlerGroup_t*": POINTER(POINTER(HandlerGroup)),
}
"""The types of C, without const and spaces, as ctypes has them."""

_RETURN = r"(?P<returns>(?:const\s+)?\w+\s*\*?)"
_ARGUMENTS = r"\((?P<arguments>[^()]*)\)\s*;"


def differences(header: str, abi: Abi) -> list[str]:
    """Yield a description of each difference between the header and the declarations of tandem."""
    header = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL)
    found: list[str] = []
    for name, arguments in FUNCTIONS[abi].items():
        match = re.search(rf"{_RETURN}\s*\b{name}\s*{_ARGUMENTS}", header)
        found += _compare(name, match, (RETURNS.get(name, c_int), *arguments))
    for structure, own in (
        ("flagcxDeviceHandle", DeviceHandle),
        ("flagcxHandlerGroup", HandlerGroup),
    ):
        if own is DeviceHandle or abi is Abi.HANDLER_GROUP:
            found += _compare_fields(structure, _body(header, structure), own)
    return found


def _body(header: str, structure: str) -> str:
    match = re.search(rf"struct\s+{structure}\s*\{{(.*?)\}}\s*;", header, flags=re.DOTALL)
    return match.group(1) if match else ""


def _compare_fields(structure: str, body: str, own: Any) -> list[str]:
    """Compare names and order, and the types of the fields that have one."""
    declared = [" ".join(part.split()) + ";" for part in body.split(";")]
    found: list[str] = []
    for (name, *kind), text in zip(own._fields_, declared, strict=False):
        match = re.fullmatch(rf"{_RETURN}\s*\(\*\s*{name}\)\s*{_ARGUMENTS}", text)
        if kind == [c_void_p] and re.search(rf"\b{name}\b", text):
            continue
        if match:
            types = (kind[0]._restype_, *kind[0]._argtypes_)
            found += _compare(f"{structure}.{name}", match, types)
        elif not re.fullmatch(rf"\w+ {name};", text) or TYPES[text.split()[0]] is not kind[0]:
            found.append(f"{structure}.{name}: the header has {text or 'nothing'} there")
    if len(declared) < len(own._fields_):
        found.append(f"{structure}: the header has fewer fields")
    return found


def _compare(name: str, match: re.Match[str] | None, types: Sequence[Any]) -> list[str]:
    """``types``: of the result, then of the arguments."""
    if match is None:
        return [f"{name}: not in the header"]
    texts = [match["returns"], *filter(str.strip, match["arguments"].split(","))]
    declared = [_plain(text, is_argument=place > 0) for place, text in enumerate(texts)]
    if len(declared) != len(types):
        return [f"{name}: {len(declared) - 1} arguments, not {len(types) - 1}"]
    return [
        f"{name}: {text} at place {place}, not {own.__name__}"
        for place, (text, own) in enumerate(zip(declared, types, strict=True))
        if TYPES.get(text) is not own
    ]


def _plain(text: str, *, is_argument: bool) -> str:
    """Return a type without const, spaces and the argument's name."""
    text = re.sub(r"\bconst\b", " ", text).strip()
    if is_argument:
        text = re.sub(r"(?<=[\s*])\w+$", "", text)
    return re.sub(r"\s", "", text)
