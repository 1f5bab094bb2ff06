# SPDX-License-Identifier: Apache-2.0
"""Adapters against the released peft: L1 (log-probs, gradients), L2 (files), L4 (the base)."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.config.derived.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapters, Rule
from tandem.config.derived.sizes import ModelSizes
from tandem.errors import UserError
from tandem.models.adapted import trained_parameters
from tandem.models.adapters import BASE_FILE, adapter_tensors
from tandem.models.decoder import Granularity
from tandem.models.folder import (
    AdapterStart,
    adapt_folder,
    check_folder,
    open_model,
    require_same_adapters,
)
from tandem.models.weights import WEIGHTS_FILE, file_views, sums_with_adapters
from tests.fakes.scoring import score_batch
from tests.fakes.tiny_adapters import ALL, SECTION, open_adapted, spread_b
from tests.unit.models.tiny_models import NATIVE, pack_shared, sample_sequences, write_hf


def _adapters(rank: int, targets: Rule, *, excludes: Rule = (), root: bool = False) -> Adapters:
    return Adapters(rank, 16.0, root, targets, excludes, folder=None, section=SECTION)


_SIZES = ModelSizes(
    num_layers=2,
    hidden=32,
    inner=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocabulary=67,
    tied=True,
)
CASES = {
    "qwen2_tied-r8": ("qwen2_tied", _adapters(8, "all-linear")),
    "qwen3_biases-r4-rslora": ("qwen3_biases", _adapters(4, "all-linear", root=True)),
    "llama_biases_tied-r1": ("llama_biases_tied", _adapters(1, "all-linear")),
    "qwen2_untied-list": ("qwen2_untied", _adapters(4, ("q_proj", "v_proj", "down_proj"))),
    "qwen2_tied-regex": ("qwen2_tied", _adapters(4, r".*\.(gate|up)_proj")),
    "llama-exclude-regex": ("llama", _adapters(4, "all-linear", excludes=r".*\.0\..*")),
    "qwen3_tied-exclude-list": ("qwen3_tied", _adapters(4, "all-linear", excludes=("k_proj",))),
}


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, Adapters]:
    """A base folder, peft's model on it with random adapters, and ours with the same rules."""
    name, adapters = CASES[request.param]
    hf = write_hf(NATIVE[name](), tmp_path / "base")
    listed = adapters.targets if isinstance(adapters.targets, str) else list(adapters.targets)
    left = adapters.excludes if isinstance(adapters.excludes, str) else list(adapters.excludes)
    config = peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=16,
        use_rslora=adapters.has_root_scale,
        target_modules=listed,
        exclude_modules=left or None,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(hf, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0.0, 0.05, generator=generator)
    model.save_pretrained(str(tmp_path / "theirs"))
    return tmp_path, model, adapters


def _their_log_probs(model: Any) -> Tensor:
    prompts, responses = sample_sequences()
    found = []
    for prompt, group in zip(prompts, responses, strict=True):
        for response in group:
            row = torch.tensor(prompt + response)
            logits = model(row[None]).logits[0]
            log_probs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
            found.append(log_probs.gather(1, row[len(prompt) :, None])[:, 0])
    return torch.cat(found)


def _our_log_probs(model: Any) -> Tensor:
    batch = pack_shared(*sample_sequences())
    return score_batch(model, batch, temperature=1.0, with_entropy=False).score_R


def test_sums_for_engines_with_weights_of_their_own_are_those_of_pefts_merge(
    pair: tuple[Path, Any, Adapters],
) -> None:
    folder, theirs, adapters = pair
    num_adapted = sum("lora_A" in name for name, _ in theirs.named_parameters())
    ours = open_adapted(folder / "base", replace(adapters, folder=folder / "theirs"))
    sums, base = sums_with_adapters(ours.decoder), dict(file_views(ours.decoder))
    merged = theirs.merge_and_unload().state_dict()
    found = base | {name: compute() for name, compute in sums.items()}
    for name, tensor in found.items():
        assert torch.allclose(tensor, merged[name], rtol=1e-6, atol=1e-6), name
    changed = [name for name, tensor in found.items() if not torch.equal(tensor, base[name])]
    assert len(changed) == num_adapted


# fp64 is bounded by transformers' rotary angles, which are fp32.
@pytest.mark.parametrize(
    ("dtype", "of_log_probs", "of_gradients"),
    [(torch.float64, 2e-6, 3e-6), (torch.float32, 5e-6, 5e-6)],
    ids=["fp64", "fp32"],
)
def test_l1_log_probs_and_gradients_equal_pefts(
    pair: tuple[Path, Any, Adapters],
    dtype: torch.dtype,
    of_log_probs: float,
    of_gradients: float,
) -> None:
    """L1: packed with shared prompts here, and single sequences in the released peft."""
    folder, theirs, adapters = pair
    theirs = theirs.to(dtype)
    ours = open_adapted(
        folder / "base", replace(adapters, folder=folder / "theirs"), dtype=dtype, base_dtype=dtype
    )
    mine, wanted = _our_log_probs(ours), _their_log_probs(theirs)
    assert (mine.double() - wanted.double()).abs().max() <= of_log_probs
    weights = torch.linspace(-1, 1, len(mine), dtype=torch.float64)
    (mine * weights).sum().backward()
    (wanted * weights).sum().backward()
    named = {key.replace(".default", ""): p for key, p in theirs.named_parameters()}
    own, table = trained_parameters(ours.decoder), list(adapter_tensors(ours.config))
    assert len(table) == sum(p.requires_grad for p in named.values())
    for tensor in table:
        whole, expected = own[tensor.parameter].grad, named[tensor.name].grad
        assert whole is not None
        gradient = whole[tensor.start : tensor.start + tensor.rows]
        assert (gradient - expected).abs().max() <= of_gradients * expected.abs().max(), tensor.name


def test_l2_peft_reads_our_folder_and_we_read_pefts(pair: tuple[Path, Any, Adapters]) -> None:
    """L2: names and tensors are those of peft bit for bit, and peft gives no warning.

    Both descriptions mean the same: peft computes the same log-probs from our folder as from its
    own, and we read rank, scale and modules from its folder.
    """
    folder, theirs, adapters = pair
    ours = open_adapted(folder / "base", _read(folder / "theirs"))
    given = open_adapted(folder / "base", replace(adapters, folder=folder / "theirs"))
    assert ours.config == given.config
    with torch.no_grad():
        wanted_log_probs = _their_log_probs(theirs)
    (folder / "ours").mkdir()
    ours.save(folder / "ours")
    mine, wanted = (load_file(folder / x / ADAPTER_WEIGHTS) for x in ("ours", "theirs"))
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = peft.PeftModel.from_pretrained(theirs.unload(), folder / "ours")
    again = {k.replace(".default", ""): v for k, v in loaded.state_dict().items() if "lora_" in k}
    assert {k: v.tolist() for k, v in again.items()} == {k: v.tolist() for k, v in mine.items()}
    with torch.no_grad():
        assert torch.equal(_their_log_probs(loaded), wanted_log_probs)
    described = open_adapted(folder / "base", _read(folder / "ours"))
    assert described.config == ours.config


def _read(folder: Path) -> Adapters:
    from tandem.config.derived.adapters import read_adapters

    return read_adapters(folder, key="adapter", section=SECTION)


def _damage_weights(base: Path) -> None:
    weights = load_file(base / WEIGHTS_FILE)
    weights["model.norm.weight"][0] += 1
    save_file(weights, base / WEIGHTS_FILE, metadata={"format": "pt"})


def test_l13_adapters_of_another_base_of_the_same_sizes_are_refused(tmp_path: Path) -> None:
    """L13: checkpoints have a hash of the base, and folders of peft its path. Without the weights
    of the model, as in a plan, nothing is compared.
    """
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    _damage_weights(tmp_path / "other")
    (tmp_path / "ours").mkdir()
    open_adapted(tmp_path / "base").save(tmp_path / "ours")
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    (tmp_path / "theirs" / BASE_FILE).unlink()
    for name in ("ours", "theirs"):
        start = replace(ALL, folder=tmp_path / name)
        open_adapted(tmp_path / "copy", start)
        with pytest.raises(
            UserError, match=r"lora_adapter_path=.* was trained on .*base, which ha"
        ):
            open_adapted(tmp_path / "other", start)
    (tmp_path / "other" / WEIGHTS_FILE).rename(tmp_path / "elsewhere")
    without_weights = check_folder(str(tmp_path / "other"), load_weight=False)
    adapt_folder(without_weights, start, seed=0)
    (tmp_path / "elsewhere").rename(tmp_path / "other" / WEIGHTS_FILE)
    description = tmp_path / "theirs" / ADAPTER_CONFIG
    content = json.loads(description.read_text())
    description.write_text(json.dumps({**content, "base_model_name_or_path": "hub/model"}))
    start = _read(tmp_path / "theirs")
    open_adapted(tmp_path / "other", start)
    (warning,) = start.warnings(2, model=str(tmp_path / "other"), sees=False)
    assert "it says that its base is hub/model" in warning and "not checked" in warning
    assert not list(start.warnings(2, model="copies/model", sees=False))
    # Asking for such a path fails, as it does for a folder of another user.
    unreadable = f"/{'x' * 300}"
    description.write_text(json.dumps({**content, "base_model_name_or_path": unreadable}))
    start = _read(tmp_path / "theirs")
    open_adapted(tmp_path / "other", start)
    assert list(start.warnings(2, model=str(tmp_path / "other"), sees=False))


CONTRADICTIONS = {
    "rank": (replace(ALL, rank=8), "lora_rank=8: the checkpoint .*ckpt has adapters of rank 4"),
    "alpha": (replace(ALL, alpha=9.0), "lora_alpha=9.0: the checkpoint .* adapters with alpha 8"),
    "modules": (replace(ALL, excludes=("q_proj",)), "target_modules: .* adapters of other modules"),
    "scale": (replace(ALL, has_root_scale=True), "lora_adapter_path=None: .* use_rslora=False"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_adapters_of_a_checkpoint_that_contradict_the_keys_are_refused_by_the_key(
    name: str, tmp_path: Path
) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "base")
    saved, key = tmp_path / "ckpt/actor", f"{SECTION}.path"
    saved.mkdir(parents=True)
    open_adapted(tmp_path / "base").save(saved)
    folder = check_folder(str(tmp_path / "base"))
    require_same_adapters(saved, adapt_folder(folder, ALL, seed=0), key=key)
    adapters, message = CONTRADICTIONS[name]
    with pytest.raises(UserError, match=f"^{SECTION}.{message}"):
        require_same_adapters(saved, adapt_folder(folder, adapters, seed=0), key=key)
    started = replace(
        adapt_folder(folder, adapters, seed=0),
        start=AdapterStart(saved, 0, f"{SECTION}.lora_adapter_path"),
    )
    with pytest.raises(UserError, match=f"^{SECTION}.lora_adapter_path='.*ckpt/actor': the check"):
        require_same_adapters(saved, started, key=key)


def test_a_base_that_a_checkpoint_was_not_trained_on_is_named(tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    _damage_weights(tmp_path / "other")
    (tmp_path / "actor").mkdir()
    open_adapted(tmp_path / "base").save(tmp_path / "actor")
    other = adapt_folder(check_folder(str(tmp_path / "other")), ALL, seed=0)
    with pytest.raises(UserError, match=r"^model.path='.*/other': the adapters of .*/actor were t"):
        require_same_adapters(tmp_path / "actor", other, key="model.path")


def _damaged(folder: Path, damage: str) -> None:
    """Change the tensors of an adapter."""
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    first = next(iter(tensors))
    if damage == "missing":
        del tensors[first]
    elif damage == "unexpected":
        tensors["base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"] = tensors[first] + 1
    else:
        tensors[first] = tensors[first].to(torch.int8)
    save_file(tensors, folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        ("missing", r"tensor 'base_model\..*' is missing"),
        ("unexpected", r"tensor 'base_model\..*layers\.7.*' is unexpected"),
        ("integers", r"tensor 'base_model\..*' is of type I8, not one of F32, BF16, F16, F64"),
        ("cut", "cannot be read .*header"),
        ("empty", "cannot be read .*header"),
    ],
)
def test_l13_damaged_tensors_are_named(damage: str, rule: str, tmp_path: Path) -> None:
    """L13: in one line, before the base is loaded."""
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    open_adapted(tmp_path / "base").save(tmp_path / "adapter")
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    if damage in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    else:
        _damaged(tmp_path / "adapter", damage)
    found = rf"lora_adapter_path='.*adapter': {ADAPTER_WEIGHTS}:? {rule}"
    with pytest.raises(UserError, match=found) as caught:
        open_adapted(tmp_path / "base", _read(tmp_path / "adapter"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hidden_size": 24}, r"has shape \[4, 32\], not \[4, 24\]"),
        ({"num_hidden_layers": 1}, r"layers\.1\..* is unexpected"),
        ({"num_hidden_layers": 3}, r"layers\.2\..* is missing"),
    ],
    ids=["narrower", "fewer layers", "more layers"],
)
def test_l13_adapters_of_a_base_of_other_sizes_are_refused(
    change: dict[str, int], rule: str, tmp_path: Path
) -> None:
    """L13: an adapter of another base, by its shapes."""
    config = NATIVE["qwen2_tied"]()
    write_hf(config, tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    open_adapted(tmp_path / "base").save(tmp_path / "adapter")
    values = {**config.to_dict(), **change, "layer_types": None}
    write_hf(type(config)(**values), tmp_path / "other")
    with pytest.raises(UserError, match=f"lora_adapter_path=.*{rule}") as caught:
        open_adapted(tmp_path / "other", _read(tmp_path / "adapter"))
    assert "\n" not in str(caught.value)


def test_drawn_adapters_are_pefts_initial_values_and_change_nothing(tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    model = open_adapted(tmp_path, ALL)
    for name, parameter in trained_parameters(model.decoder).items():
        if name.endswith("lora_b"):
            assert not parameter.any()
        else:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound
    assert torch.equal(_our_log_probs(model), _our_log_probs(model.base()))


def test_l10_the_weight_link_lists_adapters_alone(tmp_path: Path) -> None:
    """L10: the bytes that are sent are those of the adapters."""
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    model = open_adapted(tmp_path, ALL)
    sent = sum(held.tensor.nbytes for held in model.trained_slices())
    assert sent == sum(x.nbytes for x in trained_parameters(model.decoder).values())
    assert 4 * ALL.num_parameters(_SIZES) == sent


def test_l4_base_and_copies_share_the_storage_of_the_base(tmp_path: Path) -> None:
    """L4: only the adapters of a copy are tensors of its own; a reference has none."""
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    model = open_adapted(tmp_path, ALL, base_dtype=torch.bfloat16)
    spread_b(model)
    computed, base = model.in_dtype(torch.bfloat16), model.base()
    own = dict(model.decoder.named_parameters())
    for other in (computed, base):
        for name, parameter in other.module.named_parameters():
            is_shared = parameter.data_ptr() == own[name].data_ptr()
            assert is_shared == ("lora" not in name), name
    plain = [p for n, p in own.items() if "lora" not in n]
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in plain)
    assert all(p.dtype == torch.float32 for p in trained_parameters(model.decoder).values())
    with torch.no_grad():
        assert not torch.equal(_our_log_probs(computed), _our_log_probs(base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_l4_without_adapters_log_probs_are_those_of_the_base(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """L4: bit for bit, beside adapters that have an effect."""
    write_hf(NATIVE["qwen3_biases"](), tmp_path)
    model = open_adapted(tmp_path, ALL, base_dtype=dtype)
    spread_b(model)
    plain = open_model(str(tmp_path), dtype=dtype, device="cpu")
    with torch.no_grad():
        wanted = _our_log_probs(plain)
        assert torch.equal(_our_log_probs(model.base()), wanted)
        assert not torch.equal(_our_log_probs(model.in_dtype(dtype)), wanted)


def test_l13_adapters_over_quantized_weights_are_refused_by_that_name(tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    file = tmp_path / "config.json"
    quantized = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **quantized}))
    folder = check_folder(str(tmp_path), load_weight=False)
    with pytest.raises(UserError, match="over quantized weights .* are not built"):
        adapt_folder(folder, ALL, seed=0)


class _BaseProducts(TorchDispatchMode):
    """Counts products all of whose sides are longer than those of adapters: of frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += min(*args[-2].shape, *args[-1].shape) > 3 * ALL.rank
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_biases"])
def test_recomputation_repeats_the_products_of_the_base_that_it_names_and_no_others(
    name: str, tmp_path: Path
) -> None:
    write_hf(NATIVE[name](), tmp_path)
    model = open_adapted(tmp_path)
    spread_b(model)
    packed = pack_shared(*sample_sequences())
    num_layers = len(model.decoder.layers)

    def gradients() -> tuple[int, dict[str, Tensor]]:
        model.module.zero_grad()
        with _BaseProducts() as products:
            (model.hidden(packed) @ model.lm_head_weight.T).square().sum().backward()
        trained = trained_parameters(model.module)
        grads = {name: x.grad.clone() for name, x in trained.items() if x.grad is not None}
        return products.count, grads

    count, kept = gradients()
    assert kept.keys() == trained_parameters(model.module).keys()
    repeats: dict[Granularity, int] = {"pointwise": 0, "feed_forward": 1, "full": 3}
    for granularity, more in repeats.items():
        model.set_gradient_checkpointing(True, granularity)
        repeated, recomputed = gradients()
        assert repeated - count == more * num_layers, granularity
        assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_a_weight_that_changes_before_the_backward_pass_is_noticed(tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    model = open_adapted(tmp_path)
    loss = model.hidden(pack_shared(*sample_sequences())).sum()
    with torch.no_grad():
        next(x for name, x in model.decoder.named_parameters() if "lora_b" in name).add_(1.0)
    with pytest.raises(AssertionError, match="changed between forward and backward"):
        loss.backward()
