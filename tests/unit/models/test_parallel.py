# SPDX-License-Identifier: Apache-2.0
"""The regions of the unsharded decoder that each process holds, for all ways to cut rows further.
Folder and seed fill them with the same values as the whole."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.errors import UserError
from tandem.models.decoder import DecoderConfig, parameter_shapes
from tandem.models.experts import is_fixed
from tandem.models.families import decoder_config
from tandem.models.folder import check_folder, fill_slices, open_part
from tandem.models.parallel import (
    WHOLE,
    ParallelLayout,
    Peers,
    Regions,
    check_layout,
    is_whole,
    local_config,
    slices_of_rows,
    tensor_regions,
    whole_config,
)
from tandem.models.weights import allocate
from tandem.types import HeldSlice, SliceSpec
from tests.unit.models.tiny_models import EXPERTS, NATIVE, SIZES, write_hf

FOUR_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def config_of(case: str) -> DecoderConfig:
    config = decoder_config((NATIVE | EXPERTS)[case]().to_dict() | FOUR_HEADS)
    assert config is not None
    return config


def regions_of(config: DecoderConfig, *, rank: int, size: int) -> dict[str, Regions]:
    return tensor_regions(config, rank=rank, size=size, dtype=torch.float32)


def box(spec: SliceSpec) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(spec.offset, spec.size, strict=True))


def held_by(config: DecoderConfig, size: int, *, num_cuts: int) -> Iterator[HeldSlice]:
    """Yield the slices of all tensor-parallel processes, with rows cut as ``chunk`` cuts."""
    for rank in range(size):
        local_shapes = parameter_shapes(local_config(config, size))
        regions = regions_of(config, rank=rank, size=size)
        assert list(regions) == list(local_shapes)
        for name, shape in local_shapes.items():
            first_row = 0
            for rows in torch.zeros(shape).chunk(num_cuts):
                yield from slices_of_rows(regions[name], rows, first_row=first_row)
                first_row += len(rows)
            assert slices_of_rows(regions[name], torch.zeros(0, *shape[1:]), first_row=1) == []


@pytest.mark.parametrize("num_cuts", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", [*NATIVE, "deepseek_v3"])
def test_slices_tile_every_tensor_once(case: str, size: int, num_cuts: int) -> None:
    config = config_of(case)
    counts = {name: torch.zeros(shape) for name, shape in parameter_shapes(config).items()}
    for held in held_by(config, size, num_cuts=num_cuts):
        assert held.spec.shape == counts[held.spec.name].shape
        assert held.spec.size == held.tensor.shape
        counts[held.spec.name][box(held.spec)] += 1
    for name, regions in regions_of(config, rank=0, size=size).items():
        times = size if is_whole(regions) else 1
        assert torch.equal(counts[name], torch.full_like(counts[name], times)), name


def test_what_is_cut() -> None:
    regions = regions_of(config_of("llama_biases_tied"), rank=1, size=2)
    cut = {name.removeprefix("layers.0.") for name in regions if not is_whole(regions[name])}
    assert {name for name in cut if not name.startswith("layers.")} == {
        *("qkv.weight", "qkv.bias", "gate_up.weight", "gate_up.bias", "o.weight", "down.weight")
    }
    gate_up = regions["layers.0.gate_up.bias"]
    assert [(box.offset, box.size) for box in gate_up] == [((24,), (24,)), ((72,), (24,))]


def test_a_process_alone_holds_tensors_in_one_piece() -> None:
    for regions in regions_of(config_of("qwen2_tied"), rank=0, size=1).values():
        assert len(regions) == 1
        assert is_whole(regions)


def test_views_are_not_copies() -> None:
    regions = regions_of(config_of("qwen2_tied"), rank=1, size=2)["layers.0.o.weight"]
    rows = torch.zeros(5, 16, dtype=torch.bfloat16)
    (held,) = slices_of_rows(regions, rows, first_row=7)
    assert held.spec.dtype == torch.bfloat16
    held.tensor.fill_(1)
    assert rows.min() == 1
    assert (held.spec.offset, held.spec.size, held.spec.shape) == ((7, 16), (5, 16), (32, 32))


def test_configs_of_parts_and_back() -> None:
    config = config_of("qwen3_tied")
    local = local_config(config, 4)
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (2, 1, 12)
    assert whole_config(local, 4) == config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "case", ["qwen2_untied", "qwen3_biases", "llama_biases_tied", "deepseek_v3"]
)
def test_parts_are_filled_as_the_whole(
    case: str, seed: int | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_hf((NATIVE | EXPERTS)[case](), tmp_path)
    folder = check_folder(str(tmp_path))
    whole = open_part(folder, WHOLE, dtype=dtype, device="cpu", random_seed=seed)
    expected = dict(whole.module.named_parameters())
    for rank in range(2):
        layout = ParallelLayout(tensor=Peers(rank, 2))
        part = open_part(folder, layout, dtype=dtype, device="cpu", random_seed=seed)
        slices = part.held_slices()
        assert {held.spec.name for held in slices} == set(expected)
        for held in slices:
            own = torch.float32 if is_fixed(held.spec.name) else dtype
            assert held.tensor.dtype == own
            assert torch.equal(held.tensor, expected[held.spec.name][box(held.spec)])


@pytest.mark.parametrize("seed", [None, 3])
def test_a_part_cut_further_reads_its_rows_only(seed: int | None, tmp_path: Path) -> None:
    write_hf(NATIVE["qwen3_biases"](), tmp_path)
    folder = check_folder(str(tmp_path))
    layout = ParallelLayout(tensor=Peers(1, 2))
    empty = open_part(folder, layout, dtype=torch.float32, device="meta", random_seed=seed)
    assert all(parameter.is_meta for parameter in empty.module.parameters())
    regions, cuts, slices = empty.regions(), {}, []
    for name, parameter in empty.module.named_parameters():
        first = len(parameter) // 3
        cuts[name] = torch.full((len(parameter) - first, *parameter.shape[1:]), torch.nan)
        slices += slices_of_rows(regions[name], cuts[name], first_row=first)
    fill_slices(folder, slices, random_seed=seed)
    full = open_part(folder, layout, dtype=torch.float32, device="cpu", random_seed=seed)
    for name, parameter in full.module.named_parameters():
        assert torch.equal(cuts[name], parameter[len(parameter) // 3 :]), name


def test_a_part_in_another_precision_is_the_same_part(tmp_path: Path) -> None:
    write_hf(NATIVE["llama_biases_tied"](), tmp_path)
    layout = ParallelLayout(tensor=Peers(1, 2))
    folder = check_folder(str(tmp_path))
    part = open_part(folder, layout, dtype=torch.float32, device="cpu")
    half = part.in_dtype(torch.bfloat16)
    assert half.layout == layout
    assert half.config == part.config == folder.decoder_config
    kinds = [type(module) for module in part.module.modules()]
    assert kinds == [type(module) for module in half.module.modules()]
    for one, other in zip(part.module.parameters(), half.module.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)


def test_parts_put_together_are_the_model_again(tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "a")
    folder = check_folder(str(tmp_path / "a"))
    whole = open_part(folder, WHOLE, dtype=torch.float32, device="cpu")
    expected = dict(whole.module.named_parameters())
    weights = {name: torch.full(x.shape, torch.nan) for name, x in expected.items()}
    for rank in range(2):
        layout = ParallelLayout(tensor=Peers(rank, 2))
        part = open_part(folder, layout, dtype=torch.float32, device="cpu")
        for held in part.held_slices():
            weights[held.spec.name][box(held.spec)] = held.tensor
    (tmp_path / "b").mkdir()
    part.unsharded(weights).save(tmp_path / "b")
    again = open_part(check_folder(str(tmp_path / "b")), WHOLE, dtype=torch.float32, device="cpu")
    for name, parameter in again.module.named_parameters():
        assert torch.equal(parameter, expected[name])


@pytest.mark.parametrize(
    ("tensor", "sequence", "message"),
    [
        (
            3,
            1,
            r"tensor_model_parallel_size=3: it must divide the model's 8 attention heads, 4 key",
        ),
        (8, 1, r"size=8: .* 4 key/value heads and feed-forward width of 48\. Use 1 or 2 or 4\."),
        (0, 1, r"tensor_model_parallel_size=0: "),
        (1, 3, r"ulysses_sequence_parallel_size=3: it must divide the 8 .*\. Use 1 or 2 or 4 or 8"),
        (2, 8, r"ulysses_sequence_parallel_size=8: it must divide the 4 attention heads of a proc"),
    ],
)
def test_sizes_that_do_not_divide(tensor: int, sequence: int, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_layout(config_of("qwen2_tied"), tensor=tensor, sequence=sequence)
    assert str(caught.value).startswith("actor_rollout_ref.actor.fsdp_config.")
    assert "\n" not in str(caught.value)


def test_sizes_that_divide() -> None:
    config = config_of("qwen2_tied")
    for tensor, sequence in ((1, 1), (4, 2), (2, 4), (1, 8), (2, 2)):
        check_layout(config, tensor=tensor, sequence=sequence)
    with pytest.raises(UserError, match=r"=4: .* divide its 3 key/value heads or be a multiple"):
        check_layout(replace(config, num_heads=12, num_kv_heads=3), tensor=1, sequence=4)
    with pytest.raises(UserError, match="=2: .* feed-forward width of 47"):
        check_layout(replace(config, intermediate_size=47), tensor=2, sequence=1)


@pytest.mark.parametrize("sizes", [{"tensor": 2, "sequence": 1}, {"tensor": 1, "sequence": 2}])
def test_models_of_transformers_are_not_split(sizes: dict[str, int]) -> None:
    with pytest.raises(
        UserError, match=r"^here\.\w+_parallel_size=2: this model cannot be split"
    ) as e:
        check_layout(None, **sizes, section="here")
    assert "Use 1 or a model of qwen2, qwen3, llama, " in str(e.value)
    check_layout(None, tensor=1, sequence=1)


def test_sizes_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    folder = check_folder(str(tmp_path))
    with pytest.raises(UserError, match="ulysses_sequence_parallel_size=2"):
        open_part(folder, ParallelLayout(sequence=Peers(0, 2)), dtype=torch.float32, device="cpu")


def test_allocated_parts_have_their_own_shapes(tmp_path: Path) -> None:
    NATIVE["llama"]().save_pretrained(tmp_path)
    folder = check_folder(str(tmp_path), load_weight=False)
    layout = ParallelLayout(tensor=Peers(0, 2))
    part = open_part(folder, layout, dtype=torch.bfloat16, device="meta")
    allocate(part.module, dtype=torch.bfloat16, device="cpu")
    shapes = {name: tuple(x.shape) for name, x in part.module.named_parameters()}
    assert shapes == parameter_shapes(local_config(folder.decoder_config, 2))
    assert SIZES["intermediate_size"] == shapes["layers.1.gate_up.weight"][0]
