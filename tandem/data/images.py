# SPDX-License-Identifier: Apache-2.0
"""Pictures of rows: found, measured by their headers, and read once at the size of the model.

A mark ``<image>`` in the text of a prompt stands for a picture. The size in tokens follows from the
header of the file, so that prompts are measured before any picture is decoded. Resizing equals that
of transformers' processors on Pillow (bicubic). A picture is turned upright if its header says how
(EXIF). There are no videos: of an animated picture, the first one is read.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from tandem.data.files import Row, RowFault
from tandem.errors import UserError
from tandem.pictures import Picture

MARK = "<image>"
"""The mark of a picture in the text of a prompt, as in verl."""
PIXELS_KEY = "data.mm_processor_kwargs.max_pixels"
MAX_SOURCE_PIXELS = 1 << 26
"""The most pixels of a picture before it is resized: decoding takes three bytes each."""
_UNREADABLE = (OSError, ValueError, SyntaxError)
"""The errors of Pillow for a picture that is damaged."""
_DRAWINGS = ("EPS", "WMF")
"""Pillow's names of formats without pixels; to draw them, it starts other programs."""
_UNSCALED = ("I", "F")
"""Pillow's modes of numbers whose range is not known."""
_TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The way to turn a picture upright, by its orientation in EXIF; 5 and more exchange its sides."""
_MAX_ASPECT = 200
_OTHER_MEDIA = ("videos", "audios")
_FORMS = (
    "a picture is bytes, a path, a data URL in base64, or a mapping with one of them under bytes, "
    "path or image"
)
_DATA_URL = "data:"
_OWN_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""The keys by which qwen_vl_utils sizes a picture alone."""
_HALF_OF_IDS = (1 << 30) - (1 << 20)
"""The ids of training and of validation: with any vocabulary, both fit 31 bits."""


@dataclass(frozen=True, slots=True)
class PictureRule:
    """The way in which a model reads pictures.

    Attributes:
        side: the side of a token in pixels.
        min_pixels, max_pixels: the bounds of the number of pixels after resizing.
        vocabulary: the number of ids of the vocabulary, behind which those of pictures begin.
        placeholder: the id of the token that stands for a picture in a rendered prompt.
        texts: the texts of the token before it, of itself, and of the token behind it.
        max_pictures: the most pictures of a row; None for any number.
        column: the column of the pictures.
    """

    side: int
    min_pixels: int
    max_pixels: int
    vocabulary: int
    placeholder: int
    texts: tuple[str, ...]
    max_pictures: int | None = None
    column: str = "images"

    @property
    def text(self) -> str:
        """The text of a picture in a rendered prompt."""
        return "".join(self.texts)

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns in tokens of a picture with these sides in pixels.

        Raises:
            RowFault: the picture is too narrow.
        """
        if max(height, width) > _MAX_ASPECT * min(height, width):
            rule = f"has a picture of {width} x {height} pixels, narrower than 1 to {_MAX_ASPECT}"
            raise RowFault(rule)
        sides = (height, width)
        rounded = [round(side / self.side) * self.side for side in sides]
        area = rounded[0] * rounded[1]
        if area > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            rounded = [
                max(self.side, math.floor(side / factor / self.side) * self.side) for side in sides
            ]
        elif area < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rounded = [math.ceil(side * factor / self.side) * self.side for side in sides]
        return rounded[0] // self.side, rounded[1] // self.side

    def first_id(self, *, validation: bool) -> int:
        """Return the id of the first token of all pictures of training, or of validation."""
        return self.vocabulary + (_HALF_OF_IDS if validation else 0)


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A measured picture that is not decoded.

    Attributes:
        data: the bytes of its file, or its path.
        first_id, rows, columns, side: as in ``Picture``.
        place: the row with its file, for messages.
    """

    data: bytes | Path
    first_id: int
    rows: int
    columns: int
    side: int
    place: str

    @property
    def num_tokens(self) -> int:
        """The number of its tokens."""
        return self.rows * self.columns

    @property
    def content(self) -> bytes:
        """A hash of its bytes, or its path."""
        if isinstance(self.data, Path):
            return str(self.data).encode()
        return hashlib.sha256(self.data).digest()

    def damage(self) -> str:
        """Decode it and keep nothing; return why it cannot be decoded, "" if it can be."""
        try:
            with Image.open(_file_of(self.data)) as image:
                image.draft("RGB", (1, 1))  # a JPEG is decoded at an eighth of its size
                image.load()
        except _UNREADABLE as error:
            return _cause(error)
        return ""

    def read(self) -> Picture:
        """Decode and resize it.

        Raises:
            UserError: its bytes are damaged, or its file is gone.
        """
        size = (self.columns * self.side, self.rows * self.side)
        try:
            with Image.open(_file_of(self.data)) as image:
                pixels = np.asarray(_upright(image).resize(size, Image.Resampling.BICUBIC))
        except _UNREADABLE as error:
            raise UserError(
                self.place,
                rule=f"a picture of the row is damaged ({_cause(error)})",
                remedy="Correct or remove the row.",
            ) from error
        return Picture(self.first_id, self.rows, self.columns, self.side, pixels.tobytes())


def ids_of_text(token_ids: np.ndarray, pictures: Sequence[PictureSource]) -> np.ndarray:
    """Return the tokens of a sequence that are not of its pictures."""
    return token_ids[token_ids < pictures[0].first_id] if pictures else token_ids


def require_no_pictures(row: Row, columns: Sequence[str]) -> None:
    """Raise RowFault if a row has pictures, videos or sound, which a model of text cannot read."""
    names = (*columns, *_OTHER_MEDIA)
    if row.keys().isdisjoint(names):  # as in most data sets, of which some have a million rows
        return
    media = next((name for name in names if _present(row.get(name))), None)
    if media is not None:
        rule = f"has {media}, and the model reads text only"
        raise RowFault(rule, "Use a data set of text, a model that sees, or remove the column.")


def find_pictures(row: Row, prompt: Any, *, rule: PictureRule) -> list[bytes | Path]:
    """Return the pictures of a row, as many as its prompt has marks.

    Raises:
        RowFault: the numbers differ, there are too many, or the row has other media.
    """
    media = next((name for name in _OTHER_MEDIA if _present(row.get(name))), None)
    if media is not None:
        raise RowFault(f"has {media}, and tandem reads pictures only", "Use rows without them.")
    column = row.get(rule.column)
    found = [] if not _present(column) else list(_listed(column))
    if rule.max_pictures is not None and len(found) > rule.max_pictures:
        limit = f"actor_rollout_ref.rollout.limit_images={rule.max_pictures}"
        fault = f"has {_counted(len(found), 'picture')}, more than {limit}"
        raise RowFault(fault, "Raise it or remove rows.")
    _require_known_parts(prompt)
    marks = _count_marks(prompt)
    if marks != len(found):
        texts = (f"{_counted(marks, 'mark')} {MARK}", _counted(len(found), "picture"))
        remedy = f"Write one {MARK} into the prompt for each picture of column {rule.column!r}."
        raise RowFault(f"has {texts[0]} and {texts[1]}", remedy)
    if rule.texts[1] in _all_text(prompt):
        fault = f"has {rule.texts[1]} in its prompt, which stands for a picture of the model"
        raise RowFault(fault, f"Write {MARK}.")
    return [_data_of(picture) for picture in found]


def measure(
    pictures: Sequence[bytes | Path], rule: PictureRule, *, first_id: int, place: str
) -> tuple[PictureSource, ...]:
    """Read the sizes of pictures from their headers.

    Args:
        first_id: the id of the first token of the first of them.
        place: the row with its file, for later messages.

    Raises:
        RowFault: a picture is missing, cannot be read, or is too large or too narrow.
    """
    sources: list[PictureSource] = []
    for number, data in enumerate(pictures, 1):
        rows, columns = rule.size_of(*_sides_of(data, number))
        sources.append(PictureSource(data, first_id, rows, columns, rule.side, place))
        first_id += rows * columns
    return tuple(sources)


def marked(chat: Any, rule: PictureRule) -> Any:
    """Return a prompt with the model's own text in place of each mark.

    Messages whose content is a list of parts become text.
    """
    if isinstance(chat, str):
        return chat.replace(MARK, rule.text)
    return [{**message, "content": _joined(message.get("content"), rule.text)} for message in chat]


def expand(
    token_ids: Sequence[int], pictures: Sequence[PictureSource], *, rule: PictureRule
) -> np.ndarray:
    """Return tokens with those of the pictures in place of the placeholders, int32.

    Raises:
        RowFault: the rendered prompt does not have a placeholder for each picture.
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    places = np.flatnonzero(ids == rule.placeholder)
    if len(places) != len(pictures):
        rule_ = f"has {_counted(len(pictures), 'picture')}, and its rendered prompt has places for "
        remedy = "Use a chat template that keeps the text of messages unchanged."
        raise RowFault(f"{rule_}{len(places)}", remedy)
    parts: list[np.ndarray] = []
    for start, stop, picture in zip([-1, *places], places, pictures, strict=False):
        first = picture.first_id
        parts += [
            ids[start + 1 : stop],
            np.arange(first, first + picture.num_tokens, dtype=np.int32),
        ]
    tail = ids[places[-1] + 1 :] if len(places) else ids
    return np.concatenate([*parts, tail])


def stored(picture: Any) -> dict[str, bytes | str]:
    """Return a picture in any of its forms as a value of a column of a file.

    Raises:
        RowFault: it is none of them.
    """
    data = _data_of(picture)
    return {"bytes": data} if isinstance(data, bytes) else {"path": str(data)}


def in_json(pictures: Any) -> Any:
    """Return the pictures of a row as JSON holds them: bytes and objects become data URLs.

    Raises:
        RowFault: an object has no colours, or bytes are empty.
    """
    if isinstance(pictures, Mapping):
        return {name: in_json(value) for name, value in pictures.items()}
    if isinstance(pictures, list | tuple | np.ndarray):
        return [in_json(picture) for picture in pictures]
    if not isinstance(pictures, bytes | Image.Image):
        return pictures
    data = _data_of(pictures)
    assert isinstance(data, bytes), "a path is text"
    return f"{_DATA_URL}image;base64,{base64.b64encode(data).decode('ascii')}"


def require_room(first_id: int, rule: PictureRule, *, validation: bool) -> None:
    """Raise UserError if the pictures of a data set have more tokens than there are ids."""
    if first_id - rule.first_id(validation=validation) > _HALF_OF_IDS:
        raise UserError(
            "data.val_files" if validation else "data.train_files",
            rule=f"its pictures have more than {_HALF_OF_IDS} tokens",
            remedy="Set data.train_max_samples, or a smaller max_pixels.",
        )


def _present(value: Any) -> bool:
    if isinstance(value, list | tuple | np.ndarray):
        return len(value) > 0
    return value is not None and value not in ("", b"")


def _listed(value: Any) -> Sequence[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _all_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_joined(message.get("content"), "") for message in prompt)


def _count_marks(prompt: Any) -> int:
    if isinstance(prompt, str):
        return prompt.count(MARK)
    return sum(_marks_of(message.get("content")) for message in prompt)


def _require_known_parts(prompt: Any) -> None:
    """Raise RowFault if a part of a message is neither a text nor the place of a picture."""
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    listed = [part for content in contents if isinstance(content, list) for part in content]
    for part in listed:
        kind = type(part).__name__
        if isinstance(part, Mapping):
            kind = part.get("type") or "text"  # Parquet has null for a field that is left out
        if kind not in ("text", "image") or (kind == "text" and not _is_text(part)):
            rule = f"has a part of type {kind!r} in a message that is neither text nor a picture"
            raise RowFault(rule, "Use parts of type text or image, and a column of the pictures.")


def _is_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _marks_of(content: Any) -> int:
    if isinstance(content, str):
        return content.count(MARK)
    return sum(part.get("type") == "image" for part in _parts(content))


def _parts(content: Any) -> list[Mapping[str, Any]]:
    listed = content if isinstance(content, list) else []
    return [part for part in listed if isinstance(part, Mapping)]


def _joined(content: Any, text: str) -> Any:
    if isinstance(content, str):
        return content.replace(MARK, text)
    if not isinstance(content, list):
        return content or ""
    written = (
        text if part.get("type") == "image" else part.get("text") for part in _parts(content)
    )
    return "".join(part or "" for part in written)


def _data_of(picture: Any) -> bytes | Path:
    """Return the bytes or the path of a picture in any of its forms."""
    if isinstance(picture, Image.Image):
        _require_colours("", _mode_of(picture))
        stream = io.BytesIO()
        _upright(picture).save(stream, format="PNG")
        return stream.getvalue()
    if isinstance(picture, Mapping):
        size = next((key for key in _OWN_SIZES if picture.get(key) is not None), None)
        if size is not None:
            rule = f"has a picture with {size} of its own, which is not built"
            raise RowFault(rule, f"Remove it, and set {PIXELS_KEY} for all pictures.")
        named = [picture[key] for key in ("bytes", "path", "image") if _present(picture.get(key))]
        if named:
            return _data_of(named[0])
    if isinstance(picture, bytes) and picture:
        return picture
    if isinstance(picture, str) and picture:
        return _decoded(picture) if picture.startswith(_DATA_URL) else _path_of(picture)
    if picture is None or isinstance(picture, Mapping | bytes | str):
        raise RowFault(f"has an empty picture; {_FORMS}")
    raise RowFault(f"has a picture that is {type(picture).__name__}; {_FORMS}")


def _decoded(url: str) -> bytes:
    """Return the bytes of a data URL. Raise RowFault if they are not written in base64."""
    head, _, text = url.partition(",")
    try:
        written = "".join(text.split())  # some programs write lines
        data = base64.b64decode(written, validate=True) if head.endswith(";base64") else b""
    except ValueError:  # another character
        data = b""
    if not data:
        raise RowFault(f"has a data URL that is not in base64 ({_shortened(url)}); {_FORMS}")
    return data


def _path_of(text: str) -> Path:
    """Return the path that a text names. Raise RowFault if there is no such file."""
    scheme, colon, _ = text.partition(":")
    if colon and scheme in ("http", "https"):
        raise RowFault(f"has a picture that is a URL ({_shortened(text)}); {_FORMS}")
    try:
        path = Path(os.path.expanduser(text.removeprefix("file://")))
        if path.is_file():
            return path
    except (OSError, ValueError):  # too long, or a null character
        pass
    raise RowFault(f"names a picture that is missing ({_shortened(text)})", "Correct the path.")


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _sides_of(data: bytes | Path, number: int) -> tuple[int, int]:
    """Return width and height in pixels of a picture that is upright, from the header."""
    try:
        # This changes the warnings of all threads; pictures are measured before others read any.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(_file_of(data)) as image:
                width, height = image.size
                kind, mode = image.format or "", _mode_of(image)
                is_lying = 5 <= _orientation_of(image) <= 8
    except UnidentifiedImageError as error:
        raise RowFault(f"has a picture (number {number}) that is no picture file") from error
    except Image.DecompressionBombError as error:  # Pillow does not say its size
        rule = f"has a picture (number {number}) of more than {MAX_SOURCE_PIXELS} pixels"
        raise RowFault(rule, "Store a smaller one.") from error
    except _UNREADABLE as error:
        rule = f"has a picture (number {number}) that cannot be read ({_cause(error)})"
        raise RowFault(rule) from error
    if width * height > MAX_SOURCE_PIXELS:
        raise RowFault(
            f"has a picture of {width} x {height} pixels, more than {MAX_SOURCE_PIXELS}",
            "Store a smaller one.",
        )
    _require_colours(kind, mode)
    return (height, width) if is_lying else (width, height)


def _require_colours(kind: str, mode: str) -> None:
    """Raise RowFault if a picture of a format and a mode of Pillow has no colours to be read."""
    if kind in _DRAWINGS or mode in _UNSCALED:
        drawing = f"is a drawing ({kind})"
        fault = drawing if kind in _DRAWINGS else f"has numbers of an unknown range (mode {mode})"
        remedy = "Store it as PNG or JPEG with eight bits a colour."
        raise RowFault(f"has a picture that {fault}", remedy)


def _orientation_of(image: Image.Image) -> int:
    """Return the orientation in EXIF in front of the pixels; 1 without it, or if it is damaged."""
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (*_UNREADABLE, TypeError, struct.error):
        return 1


def _mode_of(image: Image.Image) -> str:
    """Return Pillow's mode; gray in sixteen bits has others in older versions."""
    is_deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    return "I;16" if is_deep else image.mode


def _cause(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _file_of(data: bytes | Path) -> io.BytesIO | Path:
    return io.BytesIO(data) if isinstance(data, bytes) else data


def _upright(image: Image.Image) -> Image.Image:
    """Return a picture in red, green and blue as its orientation says."""
    turn = _TURNS.get(_orientation_of(image))  # before the pixels are read, as for its size
    return _in_rgb(image) if turn is None else _in_rgb(image).transpose(turn)


def _in_rgb(image: Image.Image) -> Image.Image:
    """Return a picture in red, green and blue; transparent parts become white."""
    if image.mode == "RGB":
        return image
    if _mode_of(image) == "I;16":  # Pillow would cut numbers above 255
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        layers = image.convert("RGBA")
        white = Image.new("RGBA", layers.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layers).convert("RGB")
    return image.convert("RGB")
