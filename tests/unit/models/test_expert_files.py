# SPDX-License-Identifier: Apache-2.0
"""Files of models with experts: both layouts, names of keys, missing tensors (MO3, MO4)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.derived.experts import experts_of
from tandem.errors import UserError
from tandem.models.decoder import parameter_shapes
from tandem.models.families import decoder_config
from tandem.models.folder import check_folder, open_model
from tandem.models.weights import WEIGHTS_FILE, convert_folder, draw_slices
from tandem.types import HeldSlice, SliceSpec
from tests.unit.models.tiny_models import EXPERTS, SIZES, open_fp32, write_hf, write_xdg

QWEN = {
    "model_type": "qwen3_moe",
    **SIZES,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS_FILE)


def change_files(folder: Path, change) -> None:
    """Apply ``change`` to the tensors of a folder."""
    tensors = files_of(folder)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("case", [*EXPERTS, "XdgMoE"])
def test_mo3_a_round_trip_is_exact_in_both_layouts(case, tmp_path):
    whole, fused, again = (tmp_path / name for name in ("whole", "fused", "again"))
    if case == "XdgMoE":
        write_xdg(whole)
    else:
        write_hf(EXPERTS[case](), whole).save_pretrained(fused, save_original_format=False)
    again.mkdir()
    wanted = files_of(whole)
    for source in (whole, fused) if case != "XdgMoE" else (whole,):
        open_fp32(source).save(again)
        found = files_of(again)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_mo3_layers_behind_the_last_one_are_skipped(tmp_path):
    write_hf(EXPERTS["dots1"](), tmp_path)
    extra = "model.layers.2.mlp.gate.weight"
    change_files(tmp_path, lambda tensors: tensors.update({extra: torch.zeros(2, 2)}))
    with pytest.raises(UserError, match=f"unexpected tensor '{extra}'"):
        check_folder(str(tmp_path))
    content = json.loads((tmp_path / "config.json").read_text())
    content["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(content))
    check_folder(str(tmp_path))


def test_mo3_a_missing_expert_is_named_in_one_line(tmp_path):
    write_hf(EXPERTS["qwen3_moe"](), tmp_path)
    missing = "model.layers.1.mlp.experts.5.up_proj.weight"
    change_files(tmp_path, lambda tensors: tensors.pop(missing))
    with pytest.raises(UserError) as raised:
        check_folder(str(tmp_path))
    assert f"tensor '{missing}' is missing from the weights" in str(raised.value)
    assert "\n" not in str(raised.value)


def fuse(tensors: dict[str, torch.Tensor], layer: int) -> None:
    """Replace the experts of a layer by the two tensors of the other layout."""
    own = f"model.layers.{layer}.mlp.experts"
    gate, up, down = (
        [tensors.pop(f"{own}.{expert}.{name}_proj.weight") for expert in range(8)]
        for name in ("gate", "up", "down")
    )
    pairs = zip(gate, up, strict=True)
    tensors[f"{own}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    tensors[f"{own}.down_proj"] = torch.stack(down)


@pytest.mark.parametrize("layer", [0, 1])
def test_mo3_a_layer_in_the_other_layout_is_one_line(layer, tmp_path):
    write_hf(EXPERTS["qwen3_moe"](), tmp_path)
    change_files(tmp_path, lambda tensors: fuse(tensors, layer))
    with pytest.raises(UserError) as raised:
        check_folder(str(tmp_path))
    missing = f"model.layers.{1 - layer}.mlp.experts.gate_up_proj"
    assert f"tensor '{missing}' is missing from the weights" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_mo3_experts_may_have_several_types_of_numbers_but_no_integers_or_fp8(tmp_path):
    write_hf(EXPERTS["qwen3_moe"](), tmp_path)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    halved = files_of(tmp_path)[name].bfloat16()
    change_files(tmp_path, lambda tensors: tensors.update({name: halved}))
    experts = open_fp32(tmp_path).decoder.layers[1].experts
    assert torch.equal(experts.routed.gate_up[5][24:], halved.float())
    for dtype, shown in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        other = {name: halved.to(dtype)}
        change_files(tmp_path, lambda tensors, x=other: tensors.update(x))
        with pytest.raises(UserError) as raised:
            check_folder(str(tmp_path))
        assert str(raised.value) == (
            f"actor_rollout_ref.model.path={str(tmp_path)!r}: tensor {name!r} has numbers of type "
            f"{shown}, which are not read. Use weights in bf16, fp16 or fp32."
        )


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_mo3_three_names_of_the_number_of_experts(name):
    renamed = {key: value for key, value in QWEN.items() if key != "num_experts"} | {name: 8}
    assert experts_of(renamed) == experts_of(QWEN)


def test_mo3_config_of_transformers_is_read():
    config = decoder_config(EXPERTS["qwen3_moe"]().to_dict())
    assert config is not None and config.experts is not None
    assert (config.experts.num_experts, config.experts.num_chosen) == (8, 3)
    assert decoder_config(EXPERTS["mixtral"]().to_dict()).head_dim == 8


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": None}, "config.json: num_experts=None: must be a positive integer"),
        ({"num_experts_per_tok": 9}, "config.json: num_experts_per_tok=9: must be at most 8"),
        ({"model_type": "dots1", "n_group": 3}, "n_group=3: must be a divisor of 8 experts"),
        ({"model_type": "dots1", "n_group": 2, "topk_group": 3}, "topk_group=3: must be at most 2"),
        (
            {"model_type": "dots1", "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "num_experts_per_tok=3: must be at most 2, the experts of 1 group(s)",
        ),
        ({"num_experts": 0}, "config.json: num_experts=0: must be a positive integer"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok=True: must be a positive integer"),
        ({"model_type": "XdgMoE", "scoring_func": "tanh"}, "scoring_func='tanh': must be one of"),
        (
            {"model_type": "dots1", "scoring_func": "softmax"},
            "config.json: scoring_func='softmax': must be one of sigmoid, noaux_tc. Use the config",
        ),
        (
            {"model_type": "deepseek_v2", **LATENT, "scoring_func": "sigmoid"},
            "scoring_func='sigmoid': must be one of softmax. Use",
        ),
        (
            {"model_type": "deepseek_v2", **LATENT, "topk_method": "noaux_tc"},
            "topk_method='noaux_tc': must be",
        ),
        (
            {"model_type": "deepseek_v2", **LATENT, "mlp_bias": True},
            "mlp_bias=True: experts with biases are",
        ),
        (
            {"moe_intermediate_size": 28},
            "moe_intermediate_size=28: a model with experts needs a multiple of 8. Use a model "
            "with another width, such as moe_intermediate_size=32.",
        ),
        ({"hidden_size": 36}, "config.json: hidden_size=36: a model with experts needs a multiple"),
        ({"model_type": "mixtral", "intermediate_size": 50}, "config.json: intermediate_size=50: "),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank=None: must be a positive integer"),
        ({"model_type": "mixtral", "sliding_window": 32}, "sliding-window attention"),
        (
            {"model_type": "dots1", "sliding_window": 32, "max_window_layers": 1},
            "sliding-window attention",
        ),
    ],
)
def test_mo3_wrong_sizes_are_one_line(change, text):
    with pytest.raises(UserError) as raised:
        decoder_config(QWEN | change)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("change", [{"scoring_func": "noaux_tc"}, {"norm_topk_prob": True}])
def test_mo3_a_single_expert_of_red_moe_keeps_its_score_as_weight(change):
    found = {
        number: experts_of(QWEN | change | {"model_type": "XdgMoE", "num_experts_per_tok": number})
        for number in (1, 2)
    }
    assert not found[1].is_renormalized and found[2].is_renormalized


def test_a_model_whose_layers_are_all_dense_has_no_experts():
    assert decoder_config(QWEN | {"mlp_only_layers": [0, 1]}).experts is None


def test_mo4_the_correction_stays_in_fp32_in_copies_and_files(tmp_path):
    source, exported, converted = (tmp_path / name for name in ("source", "exported", "converted"))
    write_hf(EXPERTS["dots1"](), source)
    values = files_of(source)[CORRECTION]
    assert values.any() and not torch.equal(values, values.bfloat16().float())
    model = open_model(str(source), dtype=torch.bfloat16, device="cpu")
    parameter = model.decoder.layers[1].experts.correction
    assert torch.equal(parameter, values) and not parameter.requires_grad
    assert torch.equal(
        open_fp32(source).in_dtype(torch.bfloat16).decoder.layers[1].experts.correction, values
    )
    exported.mkdir()
    model.save(exported)
    convert_folder(source, converted, dtype="bfloat16")
    for folder in (exported, converted):
        assert torch.equal(files_of(folder)[CORRECTION], values)
        assert files_of(folder)["model.norm.weight"].dtype == torch.bfloat16


def test_random_experts_do_not_depend_on_the_part_that_is_drawn():
    config = decoder_config(QWEN)
    name = "layers.1.experts.routed.gate_up"
    shape = parameter_shapes(config)[name]

    def drawn(offset, size):
        spec = SliceSpec(name, torch.float32, shape, offset=offset, size=size)
        held = HeldSlice(spec, torch.zeros(size))
        draw_slices(config, [held], seed=3)
        return held.tensor

    whole = drawn((0, 0, 0), shape)
    assert whole.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(whole[0], whole[1])
    assert torch.equal(drawn((2, 4, 0), (3, 5, shape[2])), whole[2:5, 4:9])
