# SPDX-License-Identifier: Apache-2.0
"""Models that see equal transformers': tower, positions, log-probs, gradients and files."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tandem.config.derived.vision import read_normalisation, read_pixel_bounds
from tandem.data.packing import TrainSequence, pack
from tandem.errors import UserError
from tandem.models.families import decoder_config
from tandem.models.folder import open_model
from tandem.models.language_model import NativeModel
from tandem.models.sight import see
from tandem.models.weights import check_weights, file_tensors, read_config
from tandem.pictures import total_shift
from tandem.types import Segments
from tests.fakes.scoring import score_batch
from tests.fakes.tiny_vision import (
    FAMILIES,
    IMAGE,
    VOCAB,
    draw_picture,
    draw_prompt,
    theirs,
    write_seeing,
)

PLANS = (([(3, 2), (2, 2)], 3), ([], 2), ([(5, 3)], 1), ([(2, 4)], 2))
"""The sizes of the pictures of a prompt, and the number of its responses."""


def open_seeing(folder: Path) -> NativeModel:
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    assert isinstance(model, NativeModel)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """Transformers' model and ours."""
    folder = tmp_path_factory.mktemp(request.param)
    model = write_seeing(request.param, folder)
    return model, open_seeing(folder)


def patches_of(ours, pictures):
    tower = ours.decoder.tower
    return torch.cat([tower._patches(picture, torch.device("cpu")) for picture in pictures])


def make_batch():
    """Return sequences of the plans, whose first prompt has responses that contain IMAGE."""
    rng, sequences, first_id = random.Random(1), [], VOCAB
    for key, (sizes, count) in enumerate(PLANS):
        prompt, pictures = draw_prompt(rng, sizes, first_id=first_id)
        first_id += sum(picture.num_tokens for picture in pictures)
        for _ in range(count):
            tail = [rng.randrange(20, VOCAB) for _ in range(rng.randint(2, 7))]
            if key == 0:
                tail[1] = IMAGE  # a policy may draw the placeholder itself
            ids = (tuple(prompt), tuple(tail))
            sequences.append(TrainSequence(key, *ids, pictures=pictures))
    return sequences


def their_log_probs(model, ours, sequence):
    prompt, tail = list(sequence.prompt_ids), list(sequence.response_ids)
    pictures = sequence.pictures
    patches = patches_of(ours, pictures) if pictures else None
    given = theirs(model, prompt, pictures, patches=patches)
    more = torch.arange(len(prompt), len(prompt) + len(tail)) + given.pop("delta")
    position = torch.cat([given.pop("position_ids"), more.expand(3, 1, -1)], 2)
    ids = given.pop("input_ids")
    # Transformers looks for placeholders in all tokens: the drawn one must not be one of them.
    safe = torch.cat([ids, torch.tensor([[20 if x == IMAGE else x for x in tail]])], 1)
    table = model.model.language_model.embed_tokens
    embeds = torch.nn.functional.embedding(torch.cat([ids, torch.tensor([tail])], 1), table.weight)
    hook = table.register_forward_hook(lambda module, inputs, output: embeds)
    logits = model(input_ids=safe, position_ids=position, **given).logits[0]
    hook.remove()
    places = torch.arange(len(prompt) - 1, len(prompt) + len(tail) - 1)
    return torch.log_softmax(logits, -1)[places, torch.tensor(tail)]


def test_VL1_tower_equals_transformers(pair):  # noqa: N802
    """VL1: one to five pictures of random sizes at once. There are no videos."""
    model, ours = pair
    rng = random.Random(0)
    for count in range(1, 6):
        sizes = [(rng.randint(1, 7), rng.randint(1, 7)) for _ in range(count)]
        check_tower(model, ours, sizes, rng)
    check_tower(model, ours, [(1, 1), (1, 30), (30, 1)], rng)


def check_tower(model, ours, sizes, rng):
    """Compare what both towers make of pictures with these rows and columns."""
    pictures = [draw_picture(rng, VOCAB, rows=r, columns=c) for r, c in sizes]
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in sizes])
    with torch.no_grad():
        patches = patches_of(ours, pictures)
        want = model.model.visual(patches, grid_thw=grids, return_dict=True)
        got = ours.decoder.tower(pictures)
    largest = want.pooler_output.abs().max()
    assert (got.embeddings - want.pooler_output).abs().max() < 2e-6 * largest
    levels = getattr(want, "deepstack_features", None) or []
    assert len(levels) == len(got.levels)
    for theirs_UD, ours_UD in zip(levels, got.levels, strict=True):
        assert (ours_UD - theirs_UD).abs().max() < 5e-6 * theirs_UD.abs().max()


def test_VL2_packed_log_probs_equal_transformers(pair):  # noqa: N802
    """VL2: packed with shared prompts, prompts of text, and a drawn placeholder."""
    model, ours = pair
    sequences = make_batch()
    with torch.no_grad():
        scores = score_batch(ours, pack(sequences), temperature=1.0, with_entropy=False)
        want = torch.cat([their_log_probs(model, ours, sequence) for sequence in sequences])
    assert (scores.score_R - want).abs().max() < 1e-5


def test_VL3_gradients_equal_transformers(pair):  # noqa: N802
    """VL3: of tower, merger and decoder, also with layers computed again."""
    model, ours = pair
    sequences = make_batch()
    scores = score_batch(ours, pack(sequences), temperature=1.0, with_entropy=False).score_R
    weights = torch.randn(len(scores), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    ours.module.zero_grad()
    (scores * weights).sum().backward()
    want = torch.cat([their_log_probs(model, ours, sequence) for sequence in sequences])
    (want * weights).sum().backward()
    their_grads = {short(name): x.grad for name, x in model.named_parameters()}
    own = dict(ours.decoder.named_parameters())
    kept = {name: x.grad.clone() for name, x in own.items()}
    ours.module.zero_grad()
    ours.set_gradient_checkpointing(True)
    again = score_batch(ours, pack(sequences), temperature=1.0, with_entropy=False).score_R
    ours.set_gradient_checkpointing(False)
    (again * weights).sum().backward()
    assert all(torch.equal(own[name].grad, kept[name]) for name in own), "computed again"
    for tensor in file_tensors(ours.config):
        grad = own[tensor.parameter].grad
        mine = grad[tensor.start : tensor.start + tensor.rows]
        other = their_grads.pop(short(tensor.name))
        assert (mine - other).abs().max() < 1e-4 * other.abs().max(), tensor.name
    assert not their_grads


def short(name):
    """Return the name of a tensor without what differs between files and modules."""
    for prefix in ("model.", "language_model.", "visual."):
        name = name.removeprefix(prefix)
    return name


def test_VL4_positions_equal_transformers(pair):  # noqa: N802
    """VL4: 1000 random prompts, and the tokens behind them. There are no videos."""
    model, ours = pair
    rng = random.Random(2)
    for _ in range(1000):
        sizes = [(rng.randint(1, 5), rng.randint(1, 5)) for _ in range(rng.randint(1, 3))]
        prompt, pictures = draw_prompt(rng, sizes, first_id=VOCAB)
        given = theirs(model, prompt, pictures, patches=None)
        length = len(prompt) + 3
        zero, whole = torch.zeros(1, dtype=torch.int64), torch.tensor([length])
        found = see(
            torch.tensor([*prompt, 20, 21, 22]),
            torch.arange(length),
            segments=Segments(zero, whole, zero, zero),
            pictures=pictures,
        )
        assert torch.equal(found.position_T3[: len(prompt)].T, given["position_ids"][:, 0])
        assert total_shift(pictures) == given["delta"]
        assert (
            found.position_T3[len(prompt) :, 0] == torch.arange(3) + len(prompt) + given["delta"]
        ).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_positions_equal_transformers(family, tmp_path):
    """YaRN, which Qwen2.5-VL's page proposes for long inputs."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    model, sequence = write_seeing(family, tmp_path, scaling=yarn), make_batch()[0]
    ours = open_seeing(tmp_path)
    with torch.no_grad():
        scores = score_batch(ours, pack([sequence]), temperature=1.0, with_entropy=False)
        want = their_log_probs(model, ours, sequence)
    assert (scores.score_R - want).abs().max() < 1e-5


def test_bounds_of_pictures_are_read_where_transformers_saves_them(tmp_path):
    assert read_pixel_bounds(tmp_path) == (3136, 1003520)
    size = {"shortest_edge": 1024, "longest_edge": 4096}
    colours = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 1]}
    part = {"image_processor": {"size": size, **colours}}
    (tmp_path / "processor_config.json").write_text(json.dumps(part))
    assert read_pixel_bounds(tmp_path) == (1024, 4096)
    assert read_normalisation(tmp_path) == ((0.5, 0.5, 0.5), (0.25, 0.5, 1.0))
    older = {"min_pixels": 64, "max_pixels": 128}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    assert read_pixel_bounds(tmp_path) == (64, 128)


def hub_layout(folder: Path, out: Path, *, flat: bool) -> None:
    """Write a folder with the names and the configuration that the hub has, or the other one."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if flat:  # Qwen2.5-VL on the hub
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        config = {**text, **config, "rope_theta": rope["rope_theta"]}
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config["vision_config"]["in_chans"] = config["vision_config"].pop("in_channels")
    else:  # the modules of transformers
        renames = {"model.layers": "model.language_model.layers", "visual.": "model.visual."}
        renames |= {"model.norm": "model.language_model.norm"}
        renames |= {"model.embed": "model.language_model.embed"}
        for old, other in renames.items():
            tensors = {
                other + name.removeprefix(old) if name.startswith(old) else name: x
                for name, x in tensors.items()
            }
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_VL8_files_are_read_and_written_bitwise(family, tied, tmp_path):  # noqa: N802
    """VL8: in the layouts of the hub and of transformers; transformers loads ours."""
    write_seeing(family, tmp_path / "theirs", tied=tied)
    source = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = open_seeing(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    ours.save(tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    source.pop("lm_head.weight", None) if tied else None
    assert {name: x.shape for name, x in source.items()} == {n: x.shape for n, x in written.items()}
    assert all(torch.equal(source[name], written[name]) for name in source)
    again, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    if family == "qwen2_5_vl":
        for flat in (True, False):
            hub_layout(tmp_path / "theirs", tmp_path / f"hub_{flat}", flat=flat)
            hub = open_seeing(tmp_path / f"hub_{flat}")
            assert hub.config == ours.config
            for name, parameter in hub.decoder.named_parameters():
                assert torch.equal(parameter, dict(ours.decoder.named_parameters())[name])
            check_export(hub, tmp_path / f"hub_{flat}", tmp_path / f"out_{flat}", tied=tied)


def check_export(model, source, out, *, tied):
    """Check that a folder has the names of the hub and the bits that were read.

    Transformers reads it.
    """
    out.mkdir()
    model.save(out)
    read, written = (load_file(x / "model.safetensors") for x in (source, out))
    read.pop("lm_head.weight", None) if tied else None
    read = {short(name): x for name, x in read.items()}
    assert read.keys() == {short(name) for name in written}
    assert all(torch.equal(read[short(name)], x) for name, x in written.items())
    assert not any("language_model" in name for name in written)
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        out, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    same = {short(name): x for name, x in loaded.state_dict().items()}
    assert all(torch.equal(x, same[name]) for name, x in read.items())


def test_sizes_and_names_of_a_tower_are_checked(tmp_path):
    write_seeing("qwen3_vl", tmp_path)
    config = read_config(tmp_path)
    broken = {
        "depth": (0, "must be a positive integer"),
        "hidden_act": ("relu", "must be one of silu, gelu_pytorch_tanh"),
        "deepstack_visual_indexes": ([9], "must be indices of blocks, below depth"),
        "hidden_size": (36, "must be a multiple of four times num_heads"),
        "in_channels": (1, "must be 3"),
    }
    rules = [*broken.items(), ("deepstack_visual_indexes", (5, "must be indices of blocks"))]
    rules.append(("patch_size", (10**9, "must be a positive integer, at most 10000")))
    rules.append(("num_position_embeddings", (10**9, "must be .* at most 10000000")))
    rules.append(("depth", (10**9, "must be a positive integer, at most 10000")))
    for key, (value, rule) in rules:
        wrong = {**config, "vision_config": {**config["vision_config"], key: value}}
        with pytest.raises(UserError, match=f"config.json: vision_config.{key}=.*{rule}"):
            decoder_config(wrong)
    rope = {**config["text_config"]["rope_parameters"], "mrope_section": [4, 4, 4]}
    text = {**config["text_config"], "rope_parameters": rope}
    with pytest.raises(UserError, match="mrope_section=.*three numbers with the sum 8"):
        decoder_config({**config, "text_config": text})
    other = {**config, "vision_config": {**config["vision_config"], "out_hidden_size": 32}}
    with pytest.raises(UserError, match="model.visual.merger"):
        check_weights(decoder_config(other), tmp_path)
