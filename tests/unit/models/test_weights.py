# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: bitwise round trips, sharded too, and refusals that name the tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.errors import UserError
from tandem.models.folder import open_model
from tandem.models.weights import (
    INDEX_FILE,
    convert_folder,
    load_weights,
    save_hf_folder,
    weight_files,
)
from tests.unit.models.tiny_models import NATIVE, open_fp32, write_hf


def tensors_of(folder: Path) -> dict:
    return {name: x for file in weight_files(folder) for name, x in load_file(file).items()}


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", NATIVE)
def test_round_trip_is_bitwise(case, dtype, tmp_path):
    write_hf(NATIVE[case](), tmp_path / "a")
    weights = {name: x.to(dtype) for name, x in tensors_of(tmp_path / "a").items()}
    save_file(weights, tmp_path / "a" / "model.safetensors")
    decoder = open_model(str(tmp_path / "a"), dtype=dtype, device="cpu").decoder
    (tmp_path / "b").mkdir()
    save_hf_folder(decoder, tmp_path / "b")
    assert_same(weights, tensors_of(tmp_path / "b"))


def test_sharded_round_trip(tmp_path):
    write_hf(NATIVE["qwen3_biases"](), tmp_path / "a")
    decoder = open_fp32(tmp_path / "a").decoder
    (tmp_path / "b").mkdir()
    save_hf_folder(decoder, tmp_path / "b", max_shard_bytes=9000)
    files = weight_files(tmp_path / "b")
    assert len(files) > 3
    assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))
    index = json.loads((tmp_path / "b" / INDEX_FILE).read_text())
    total = sum(x.nbytes for x in tensors_of(tmp_path / "a").values())
    assert index["metadata"]["total_size"] == total
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
    load_weights(decoder, tmp_path / "b")
    (tmp_path / "c").mkdir()
    save_hf_folder(decoder, tmp_path / "c")
    assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c"))


def test_reads_shards_of_transformers_and_transformers_reads_ours(tmp_path):
    theirs = write_hf(NATIVE["qwen2_untied"](), tmp_path / "a")
    theirs.save_pretrained(tmp_path / "b", max_shard_size="9KB")
    assert len(weight_files(tmp_path / "b")) > 1
    model = open_fp32(tmp_path / "b")
    (tmp_path / "c").mkdir()
    model.save(tmp_path / "c")
    assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c"))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert_same(theirs.state_dict(), reloaded.state_dict())


def test_a_tied_head_may_stand_in_the_file(tmp_path):
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    weights = tensors_of(tmp_path)
    assert "lm_head.weight" not in weights
    before = open_fp32(tmp_path).decoder.state_dict()
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert_same(before, open_fp32(tmp_path).decoder.state_dict())


def test_old_rotary_buffers_are_ignored(tmp_path):
    write_hf(NATIVE["llama"](), tmp_path)
    before = open_fp32(tmp_path).decoder.state_dict()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors_of(tmp_path) | extra, tmp_path / "model.safetensors")
    assert_same(before, open_fp32(tmp_path).decoder.state_dict())


def test_wrong_tensors_are_named(tmp_path):
    write_hf(NATIVE["llama"](), tmp_path)
    weights = tensors_of(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"

    def refused(change: dict, message: str) -> None:
        save_file(change, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message) as caught:
            open_fp32(tmp_path)
        assert str(caught.value).startswith("actor_rollout_ref.model.path=")

    without = {other: x for other, x in weights.items() if other != name}
    refused(without, f"tensor '{name}' is missing")
    refused(weights | {name: torch.ones(3, 3)}, rf"'{name}' has shape \[3, 3\], not \[16, 32\]")
    refused(weights | {"model.layers.2.x": torch.ones(1)}, "unexpected tensor 'model.layers.2.x'")


def test_nothing_is_loaded_from_a_folder_that_does_not_fit(tmp_path):
    write_hf(NATIVE["llama"](), tmp_path)
    decoder = open_fp32(tmp_path).decoder
    before = {name: x.clone() for name, x in decoder.state_dict().items()}
    weights = {name: x + 1 for name, x in tensors_of(tmp_path).items()}
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        load_weights(decoder, tmp_path)
    assert_same(before, decoder.state_dict())


def test_broken_files_are_named(tmp_path):
    write_hf(NATIVE["llama"](), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        open_fp32(tmp_path)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(UserError, match=r"no model-00001-of-00002\.safetensors"):
        open_fp32(tmp_path)
    for content, rule in [
        ("[]", "is not a JSON object"),
        ("[" * 5000, "is not valid JSON .it is nested too deeply"),
        ("{}", "has no weight_map from tensors to files"),
        ('{"weight_map": {"a": 5}}', "the folder has no 5"),
    ]:
        (tmp_path / INDEX_FILE).write_text(content)
        with pytest.raises(UserError, match=rf"model\.path=.*{rule}"):
            open_fp32(tmp_path)


def test_an_unwritable_folder_is_an_os_error(tmp_path):
    write_hf(NATIVE["llama"](), tmp_path)
    decoder = open_fp32(tmp_path).decoder
    with pytest.raises(OSError, match="cannot write weights"):
        save_hf_folder(decoder, tmp_path / "missing")


@pytest.mark.parametrize("shard_bytes", [9000, 10**9])
def test_convert_folder(shard_bytes, tmp_path):
    write_hf(NATIVE["qwen3_tied"](), tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    model = open_fp32(tmp_path / "a")
    save_hf_folder(model.decoder, tmp_path / "a", max_shard_bytes=shard_bytes)
    convert_folder(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    expected = {name: x.bfloat16() for name, x in tensors_of(tmp_path / "a").items()}
    assert_same(expected, tensors_of(tmp_path / "b"))
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    convert_folder(tmp_path / "a", tmp_path / "c")
    assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c"))
