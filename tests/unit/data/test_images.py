# SPDX-License-Identifier: Apache-2.0
"""Pictures of rows: sizes and patches equal transformers', and the errors of wrong rows."""

from __future__ import annotations

import base64
import io
import random
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tandem.config.derived.vision import vision_config
from tandem.config.schema.data import DataConfig
from tandem.config.schema.sft import SftDataConfig
from tandem.data.files import RowSource, write_parquet
from tandem.data.images import PictureRule, PictureSource, find_pictures, measure
from tandem.data.ledger import open_source
from tandem.data.prompts import load_prompts
from tandem.data.selection import UsedRows
from tandem.data.sft import load_sft_examples
from tandem.data.tokenizer import TextCodec, load_codec
from tandem.errors import UserError
from tandem.models.vision import VisionTower
from tandem.pictures import Picture
from tandem.quickstart.seeing_model import VISION_TOKENS
from tests.fakes.seeing_files import png, row_of, write_policy

RULE = PictureRule(
    side=8,
    min_pixels=64,
    max_pixels=65536,
    vocabulary=512,
    placeholder=4,
    texts=VISION_TOKENS,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def codec(policy: Path) -> TextCodec:
    return load_codec(str(policy))


def load(rows: list[dict[str, Any]], codec: TextCodec, rule: PictureRule = RULE, **values: Any):
    """Return the entries of rows that a class of the user makes."""

    config = DataConfig.model_validate({"train_files": "rows", "max_prompt_length": 64, **values})
    source = RowSource(("rows",), "data.train_files", lambda files: rows)
    used = UsedRows(source, dict(enumerate(rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.data.prompts.read_used_rows", lambda config, validation: used)
        return load_prompts(config, codec, pictures=rule)


def test_VL5_sizes_and_patches_are_those_of_transformers() -> None:  # noqa: N802
    """VL5: 50 sizes, some of them very long or small."""
    low, high = 56 * 56, 200 * 200
    processor = Qwen2VLImageProcessorPil(min_pixels=low, max_pixels=high)
    rule = PictureRule(28, low, high, 512, 4, VISION_TOKENS)
    hf = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1, "fullatt_block_indexes": []}}
    normalisation = (tuple(processor.image_mean), tuple(processor.image_std))
    config = vision_config({**hf, "vision_config": {**hf["vision_config"], "hidden_size": 64}})
    assert config is not None and (config.mean, config.std) == normalisation
    tower = VisionTower(config)
    rng = random.Random(0)
    sizes = [(30, 41), (224, 224), (100, 333), (57, 900), (84, 84), (20, 3900), (1, 190), (14, 42)]
    sizes += [(rng.randint(8, 600), rng.randint(8, 600)) for _ in range(42)]
    assert len(sizes) == 50
    for number, (height, width) in enumerate(sizes):
        data = png(width, height, seed=number)
        want = processor(images=[Image.open(io.BytesIO(data))], return_tensors="np")
        (source,) = measure([data], rule, first_id=512, place="row 0")
        _, rows, columns = want["image_grid_thw"][0]
        assert (source.rows * 2, source.columns * 2) == (rows, columns), (height, width)
        got = tower._patches(source.read(), torch.device("cpu")).numpy()
        assert np.abs(got - want["pixel_values"]).max() < 1e-6


def test_a_row_with_pictures_becomes_a_prompt_with_ids_of_its_own(
    codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tandem.data.prompts")
    rows = [
        row_of({"bytes": png(24, 24)}, {"bytes": png(16, 8), "path": None}),
        row_of(),
        row_of(Image.open(io.BytesIO(png(9, 9)))),
    ]
    parts = [{"type": "image"}, {"type": None, "text": "how many?"}]
    rows.append({**row_of(png(8, 8)), "prompt": [{"role": "user", "content": parts}]})
    first, text, image, listed = (entry.as_draw(i) for i, entry in enumerate(load(rows, codec)))
    told = "data.train_files: 4 pictures of 3 tokens in the mean, the largest of 9"
    assert told in caplog.messages
    assert [(p.first_id, p.rows, p.columns) for p in first.pictures] == [(512, 3, 3), (521, 1, 2)]
    ids = list(first.token_ids)
    start = ids.index(512)
    assert ids[start - 1 : start + 14] == [3, *range(512, 521), 5, 3, 521, 522, 5]
    assert text.pictures == () and max(text.token_ids) < 512
    assert image.pictures[0].first_id == 523 and listed.pictures[0].first_id == 524
    assert first.pictures[0].pixels == np.asarray(Image.open(io.BytesIO(png(24, 24)))).tobytes()
    assert "<|vision_start|><|image_pad|><|vision_end|>how many?" in listed.text


def test_transparent_parts_are_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    clear.save(tmp_path / "clear.png")
    picture = PictureSource(tmp_path / "clear.png", 512, 1, 1, 8, "row 0").read()
    assert set(picture.pixels) == {255}


def damaged() -> bytes:
    """Return a picture whose header can be read, and whose end is missing."""
    return png(64, 64)[:400]


def damaged_in_the_middle() -> bytes:
    """Return a JPEG of which a part is missing."""
    stream = io.BytesIO()
    Image.open(io.BytesIO(png(64, 64))).save(stream, "JPEG")
    data = stream.getvalue()
    return data[: len(data) // 2]


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    """Return a picture as a file of a format of Pillow."""
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def header_of(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and has nothing else."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


DRAWING = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 24\n%%EndComments\nshowpage\n%%EOF\n"


def of_parts(*parts: Any) -> dict[str, Any]:
    """Return a row whose message is a list of parts, and which has no pictures."""
    return row_of() | {"prompt": [{"role": "user", "content": [*parts]}]}


WRONG = {
    "more marks": (row_of(png(), text="<image><image>?"), {}, "has 2 marks <image> and 1 picture."),
    "more pictures": (row_of(png(), png(), text="<image>"), {}, "has 1 mark <image> and 2 picture"),
    "another part": (
        of_parts({"type": "image_url", "image_url": {"url": "a.png"}}),
        {},
        "has a part of type 'image_url' in a message that is neither text nor a picture",
    ),
    "a part without text": (
        of_parts({"type": "text", "image": "a.png"}),
        {},
        "has a part of type 'text' in",
    ),
    "a part of its own form": (of_parts("how many?"), {}, "has a part of type 'str' in a message"),
    "no picture": (row_of(text="<image>?"), {}, "has 1 mark <image> and 0 pictures"),
    "missing": (row_of("no/such.png"), {}, "names a picture that is missing .no/such.png"),
    "no image": (row_of(b"hello"), {}, "has a picture .number 1. that is no picture file"),
    "folder": (row_of("."), {}, "names a picture that is missing [(][.][)]"),
    "base64": (row_of("iVBORw0KGgo="), {}, "names a picture that is missing [(]iVBORw0KGgo=[)]"),
    "huge header": (row_of(header_of(60_000, 60_000)), {}, "has a picture .number 1. of more than"),
    "large header": (row_of(header_of(9_000, 9_000)), {}, "has a picture of 9000 x 9000 pixels"),
    "no size": (row_of(header_of(0, 0)), {}, "has a picture .number 1. that is no picture file"),
    "no pixels": (row_of(header_of(9, 9)), {}, "has a picture .number 1. that is damaged"),
    "drawing": (
        row_of(DRAWING),
        {},
        "has a picture that is a drawing [(]EPS[)][.] Store it as PNG",
    ),
    "numbers": (
        row_of(saved(Image.new("F", (9, 9)), "TIFF")),
        {},
        "has a picture that has numbers of an unknown range [(]mode F[)]",
    ),
    "numbers of an object": (row_of(Image.new("I", (9, 9))), {}, "has a picture that has numbers"),
    "a size of its own": (
        row_of({"image": png(), "max_pixels": 200704, "min_pixels": None}),
        {},
        "has a picture with max_pixels of its own, which is not built. Remove it, and set data.mm",
    ),
    "null in a list": (row_of({"bytes": None, "path": None}), {}, "has an empty picture"),
    "kind": (row_of(3), {}, "has a picture that is int; a picture is bytes, a path, a data URL"),
    "array": (row_of(np.zeros((2, 2, 3))), {}, "has a picture that is ndarray; a picture is bytes"),
    "url": (row_of("https://a.b/" + "c" * 900), {}, "has a picture that is a URL .https://a.b/ccc"),
    "data URL of text": (
        row_of("data:image/svg+xml,<svg/>"),
        {},
        "has a data URL that is not in ba",
    ),
    "data URL": (row_of("data:image/png;base64,A*"), {}, "has a data URL that is not in base64"),
    "data URL of nothing": (
        row_of("data:image/png;base64,"),
        {},
        "has a data URL that is not in b",
    ),
    "long name": (row_of("x" * 9000), {}, "names a picture that is missing .xxx"),
    "no user": (row_of("~nobody.at.all/x.png"), {}, "names a picture that is missing .~nobody"),
    "none": (row_of(None), {}, "has an empty picture; a picture is bytes"),
    "empty": (row_of({"bytes": b"", "path": None}), {}, "has an empty picture; a picture is bytes"),
    "half": (row_of(damaged()), {}, "has a picture .number 1. that is damaged .*truncated"),
    "half a jpeg": (
        row_of(png(), damaged_in_the_middle()),
        {},
        "has a picture .number 2. that is damaged .*truncat",
    ),
    "narrow": (row_of(png(805, 4)), {}, "has a picture of 805 x 4 pixels, narrower than 1 to 200"),
    "videos": ({**row_of(), "videos": ["a.mp4"]}, {}, "has videos, and tandem reads pictures only"),
    "long": (
        row_of(png(96, 96)),
        {},
        "144 of them are of pictures: lower data.mm_processor_kwargs",
    ),
    "cut": (
        row_of(png()),
        {"truncation": "left"},
        "has pictures, which data.truncation=left could",
    ),
    "token": (row_of(text="<|image_pad|>"), {}, "has <.image_pad.> in its prompt.* Write <image>"),
}


@pytest.mark.parametrize("name", WRONG)
def test_VL12_a_wrong_row_is_named_in_one_line(name: str, codec: TextCodec) -> None:  # noqa: N802
    """VL12: file, row, rule and remedy."""
    row, values, message = WRONG[name]
    with pytest.raises(UserError, match=f"row 1 {message}|row 1 has a prompt.*{message}") as caught:
        load([row_of(), row], codec, **values)
    assert "\n" not in str(caught.value)


def read_alone(picture: Any) -> np.ndarray:
    """Return a picture of 40 x 24 pixels as the model gets it."""
    (found,) = find_pictures(row_of(picture), row_of(picture)["prompt"], rule=RULE)
    (source,) = measure([found], RULE, first_id=512, place="row 0")
    read = source.read()
    shape = (read.rows * RULE.side, read.columns * RULE.side, 3)
    return np.frombuffer(read.pixels, np.uint8).reshape(shape)


def test_pictures_are_turned_upright() -> None:
    """Both by the size in the header and by the pixels; a damaged orientation turns nothing."""
    upright = Image.open(io.BytesIO(png(40, 24)))
    for orientation in range(1, 10):
        note = Image.Exif()
        note[ExifTags.Base.Orientation] = orientation
        lying = Image.open(io.BytesIO(saved(upright, "PNG", exif=note)))
        wanted = np.asarray(ImageOps.exif_transpose(lying))
        assert (wanted.shape == (40, 24, 3)) == (5 <= orientation <= 8)
        assert np.array_equal(read_alone(lying), wanted)
        for data in (
            saved(upright, "PNG", exif=note),
            saved(upright, "WEBP", exif=note, lossless=1),
        ):
            assert np.array_equal(read_alone(data), wanted), orientation
    assert np.array_equal(read_alone(saved(upright, "PNG", exif=b"Exif\0\0no note")), upright)


def test_pictures_of_other_modes_have_the_colours_that_they_show() -> None:
    colours = Image.open(io.BytesIO(png(40, 24)))
    gray = Image.linear_gradient("L").resize((40, 24))
    shown = np.repeat(np.asarray(gray)[..., None], 3, 2)
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    assert np.array_equal(read_alone(saved(deep, "PNG")), shown), "sixteen bits"
    assert np.array_equal(read_alone(deep), shown)
    assert np.array_equal(read_alone(saved(gray, "PNG")), shown)
    printed = saved(colours.convert("CMYK"), "TIFF")
    assert np.array_equal(read_alone(printed), colours), "CMYK"
    clear = np.dstack([np.asarray(colours), np.zeros((24, 40, 1), np.uint8)])
    for picture in (Image.fromarray(clear), Image.fromarray(clear).convert("LA")):
        assert (read_alone(saved(picture, "PNG")) == 255).all(), "transparent parts are white"
        assert (read_alone(picture) == 255).all()
    table = Image.new("P", (40, 24), 1)
    table.putpalette([10, 20, 30, 40, 50, 60])
    assert (read_alone(saved(table, "PNG")) == (40, 50, 60)).all()
    assert (read_alone(saved(table, "PNG", transparency=1)) == 255).all()


def test_the_first_picture_of_an_animated_one_is_read() -> None:
    frames = [Image.new("RGB", (40, 24), colour) for colour in ("red", "blue")]
    moving = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (read_alone(moving) == (255, 0, 0)).all()


def test_a_picture_of_one_pixel_has_the_smallest_size() -> None:
    shown = read_alone(png(1, 1))
    assert shown.shape == (8, 8, 3) and (shown == shown[0, 0]).all()


FORMS = ("a list", "one picture", "bytes", "a path", "a file URL", "a data URL", "in a mapping")


@pytest.mark.parametrize("kind", FORMS)
def test_the_forms_of_verls_files_are_the_same_picture(
    kind: str, codec: TextCodec, tmp_path: Path
) -> None:
    """Files of the hub have a mapping with bytes; in some rows, the column is null."""
    path = tmp_path / "picture.png"
    path.write_bytes(png())
    url = f"data:image/png;base64,{base64.encodebytes(png()).decode()}"
    forms = {
        "a list": [{"bytes": png(), "path": "elsewhere.png"}],
        "one picture": {"bytes": None, "path": str(path)},
        "bytes": png(),
        "a path": [str(path)],
        "a file URL": [f"file://{path}"],
        "a data URL": [url],
        "in a mapping": [{"image": url}],
    }
    rows = [{**row_of(png()), "images": forms[kind]}, {**row_of(), "images": None}]
    write_parquet(rows, tmp_path / "rows.parquet", key="test")
    values = {"train_files": str(tmp_path / "rows.parquet"), "max_prompt_length": 64}
    first, second = load_prompts(DataConfig.model_validate(values), codec, pictures=RULE)
    (picture,) = first.as_draw(0).pictures
    assert picture.pixels == Image.open(io.BytesIO(png())).tobytes()
    assert second.pictures == ()


def test_a_prompt_that_is_text_has_pictures_too(codec: TextCodec) -> None:
    (entry,) = load([{**row_of(png()), "prompt": "<image>how many?"}], codec)
    assert len(entry.pictures) == 1
    assert sum(token >= RULE.vocabulary for token in entry.token_ids) == 9


def test_VL12_too_many_pictures_and_huge_ones(  # noqa: N802
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VL12: the bounds of a row and of a picture."""
    rule = PictureRule(8, 64, 65536, 512, 4, VISION_TOKENS, max_pictures=1)
    with pytest.raises(UserError, match="row 0 has 2 pictures, more than .*limit_images=1"):
        load([row_of(png(), png())], codec, rule)
    monkeypatch.setattr("tandem.data.images.MAX_SOURCE_PIXELS", 500)
    with pytest.raises(UserError, match="row 0 has a picture of 24 x 24 pixels, more than 500"):
        load([row_of(png())], codec)
    monkeypatch.undo()
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 200)  # Pillow opens up to twice as many
    with pytest.raises(UserError, match="row 0 has a picture .number 1. of more than 67108864 pix"):
        load([row_of(png())], codec)


@pytest.mark.parametrize(
    ("picture", "values", "message"),
    [
        (png(), {"truncation": "left"}, "has pictures, which data.truncation=left could cut"),
        (damaged(), {}, "has a picture .number 1. that is damaged"),
        (b"hello", {}, "has a picture .number 1. that is no picture file"),
        (png(), {"max_length": 12}, "has 2. tokens, .*lower data.mm_processor_kwargs.max_pixels"),
    ],
)
def test_VL12_a_wrong_demonstration_is_named_in_one_line(  # noqa: N802
    picture: bytes, values: dict[str, Any], message: str, codec: TextCodec, tmp_path: Path
) -> None:
    """VL12: rows of fine-tuning."""
    rows = [{"question": "<image>?", "answer": "3", "images": [x]} for x in (png(), picture)]
    write_parquet(
        [rows[0] | {"question": "?", "images": []}, rows[1]], tmp_path / "rows.parquet", key="test"
    )
    keys = {"prompt_key": "question", "response_key": "answer", "max_length": 128, **values}
    config = SftDataConfig.model_validate({"train_files": str(tmp_path / "rows.parquet"), **keys})
    with pytest.raises(UserError, match=f"row 1 {message}") as caught:
        load_sft_examples(config, codec, pictures=RULE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [3, {"role": "user"}, ["how many?"]])
def test_VL12_a_demonstration_without_a_prompt_is_named(  # noqa: N802
    prompt: Any, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VL12: a wrong column in the place of the prompt."""
    source = RowSource(("rows",), "data.train_files", lambda files: [])
    used = UsedRows(source, {0: {"question": prompt, "answer": "3", "images": [png()]}})
    monkeypatch.setattr("tandem.data.sft.read_used_rows", lambda config, validation: used)
    keys = {"prompt_key": "question", "response_key": "answer", "max_length": 128}
    config = SftDataConfig.model_validate({"train_files": "rows", **keys})
    with pytest.raises(UserError, match="row 0 has a prompt that is neither text nor a list"):
        load_sft_examples(config, codec, pictures=RULE)


def test_VL12_a_picture_that_is_damaged_after_the_start_is_named_when_it_is_drawn(  # noqa: N802
    codec: TextCodec, tmp_path: Path
) -> None:
    """VL12: its file has changed."""
    path = tmp_path / "picture.png"
    path.write_bytes(png(64, 64))
    entries = load([row_of(), row_of(str(path))], codec, max_prompt_length=100)
    path.write_bytes(damaged())
    with pytest.raises(UserError, match="row 1 of data.train_files: a picture .* is damaged"):
        open_source(entries, DataConfig(train_batch_size=2), total_epochs=1).draw(2)


def test_the_search_for_damaged_pictures_ends_after_a_time_and_says_how_many_it_decoded(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tandem.data.seeing")
    load([row_of(png(), png()), row_of(), row_of(png())], codec)
    assert [message for message in caplog.messages if "damaged" in message] == [
        "data.train_files: looking for damaged pictures, for at most 30 s",
        "data.train_files: 3 of 3 pictures were decoded, and none of them is damaged",
    ]
    caplog.clear()
    monkeypatch.setattr("tandem.data.seeing.CHECK_S", 0.0)
    load([row_of(png()), row_of(damaged())], codec, max_prompt_length=100)
    assert (
        "data.train_files: 0 of 2 pictures were decoded, and none of them is damaged"
        in caplog.messages
    )
    caplog.clear()
    load([row_of()], codec)
    assert not caplog.messages


def test_decoding_on_threads_leaves_the_warnings_of_the_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "picture.png").write_bytes(png())
    sources = measure([png(), tmp_path / "picture.png"], RULE, first_id=512, place="row 0")
    monkeypatch.delattr("warnings.catch_warnings")
    for source in sources:
        assert source.damage() == "" and source.read().rows == 3


def test_pictures_of_a_batch_are_decoded_at_once_and_come_in_order(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows wait for each other, which they can only if both are being decoded."""
    together, read = threading.Barrier(2, timeout=60), PictureSource.read

    def read_together(source: PictureSource) -> Picture:
        together.wait()
        return read(source)

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(PictureSource, "read", read_together)
    entries = load([row_of(png(seed=i)) for i in range(4)], codec)
    config = DataConfig(train_batch_size=4, shuffle=False)
    drawn = open_source(entries, config, total_epochs=1).draw(4)
    assert [prompt.row for prompt in drawn] == [0, 1, 2, 3]
    colours = [prompt.pictures[0].pixels for prompt in drawn]
    assert colours == [read(entry.pictures[0]).pixels for entry in entries]
