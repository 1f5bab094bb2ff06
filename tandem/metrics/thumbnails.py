# SPDX-License-Identifier: Apache-2.0
"""Small copies of the pictures of prompts, as the text of a ``data:`` address for the report."""

from __future__ import annotations

import base64
import io

from PIL import Image

MAX_SIDE = 112
"""The longest side of a thumbnail in pixels."""
_MAX_EXACT_SIDE = 64
"""The longest side of a picture that is kept bit by bit, as PNG; larger ones become JPEG."""


def thumbnail(pixels: bytes, *, width: int, height: int) -> str:
    """Return a picture of at most ``MAX_SIDE`` pixels a side as a ``data:`` address.

    Args:
        pixels: red, green and blue of each pixel, uint8, (height, width, 3).
    """
    image = Image.frombytes("RGB", (width, height), pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    kind = "png" if max(width, height) <= _MAX_EXACT_SIDE else "jpeg"
    stream = io.BytesIO()
    image.save(stream, kind)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"
