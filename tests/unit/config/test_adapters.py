# SPDX-License-Identifier: Apache-2.0
"""The keys of adapters: what they mean, L13 (what is refused, in one line), L15 (memory)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.config.check.rules import check_run, check_sft, unbuilt_run
from tandem.config.derived.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapters, adapters_of
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import trained_model
from tandem.config.parse.overrides import load_config
from tandem.config.plan.memory import GIB, plan_memory
from tandem.config.plan.plan import adapter_warnings, make_plan
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

MODEL = "actor_rollout_ref.model"
RANK = f"{MODEL}.lora_rank=8"
SAVED = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "v_proj"],
    "use_rslora": True,
    "unknown_to_us": 1,
}
SEVEN_BILLION = ModelSizes(
    num_layers=28,
    hidden=3584,
    inner=18944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocabulary=152064,
    tied=False,
)


def config(*arguments: str) -> RunConfig:
    return load_config(RunConfig, [f"{MODEL}.path=base", *arguments]).config


def adapters(*arguments: str) -> Adapters:
    found = trained_model(config(*arguments)).adapters
    assert found is not None
    return found


def write_adapter(folder: Path, content: Mapping[str, Any] | str, *, weights: bool = True) -> Path:
    folder.mkdir(parents=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / ADAPTER_CONFIG).write_text(text)
    if weights:
        (folder / ADAPTER_WEIGHTS).touch()
    return folder


def test_without_keys_all_weights_are_trained() -> None:
    assert trained_model(config()).adapters is None
    assert trained_model(config(f"{MODEL}.lora_alpha=32")).adapters is None
    assert trained_model(config(f"{MODEL}.lora_rank=0", f"{MODEL}.lora_alpha=0")).adapters is None


def test_adapters_multiplied_by_zero_are_refused() -> None:
    with pytest.raises(UserError, match=r"lora_alpha=0.0: must be above 0"):
        _ = trained_model(config(RANK, f"{MODEL}.lora_alpha=0")).adapters


def test_verls_two_spellings_mean_the_same() -> None:
    short = adapters(RANK, f"{MODEL}.lora_alpha=32", f"{MODEL}.target_modules=[q_proj,o_proj]")
    names = "[linear_qkv,linear_proj]"
    long = adapters(
        f"{MODEL}.lora.rank=8", f"{MODEL}.lora.alpha=32", f"{MODEL}.lora.target_modules={names}"
    )
    assert (short.rank, short.alpha, short.scale) == (long.rank, long.alpha, long.scale)
    assert short.targets == ("q_proj", "o_proj")
    assert long.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("arguments", "number", "first"),
    [
        ((), 14, "model.layers.0.self_attn.q_proj"),
        (("target_modules=[q_proj,v_proj]",), 4, "model.layers.0.self_attn.q_proj"),
        (("target_modules='.*mlp.*'",), 6, "model.layers.0.mlp.gate_proj"),
        (("exclude_modules='.*[.]0[.].*'",), 7, "model.layers.1.self_attn.q_proj"),
        (("exclude_modules=[q_proj,k_proj]",), 10, "model.layers.0.self_attn.v_proj"),
    ],
)
def test_rules_choose_modules_as_pefts_do(
    arguments: tuple[str, ...], number: int, first: str
) -> None:
    found = adapters(RANK, *(f"{MODEL}.{argument}" for argument in arguments)).modules(
        2, sees=False
    )
    assert (len(found), found[0]) == (number, first)


def test_a_saved_adapter_decides_alone(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", SAVED)
    found = adapters(f"{MODEL}.lora_adapter_path={folder}", f"{MODEL}.target_modules=[o_proj]")
    assert (found.rank, found.alpha, found.targets) == (8, 32.0, ("q_proj", "v_proj"))
    assert found.scale == 32 / 8**0.5
    assert found == adapters(f"{MODEL}.lora_adapter_path={folder}", RANK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "DoRA: not built"),
        ({"modules_to_save": ["lm_head"]}, "modules that are saved whole"),
        ({"rank_pattern": {"q_proj": 4}}, "a rank for some modules"),
        ({"alpha_pattern": {"q_proj": 4}}, "an alpha for some modules"),
        ({"bias": "lora_only"}, "trained biases"),
        ({"lora_dropout": 0.1}, "lora_dropout=0.1: dropout is not built"),
        ({"init_lora_weights": "pissa"}, "initial values that change the base"),
        ({"peft_type": "IA3"}, "peft_type=IA3: only LORA is built"),
        ({"r": 0}, "must have r of 1 or more"),
        ({"lora_alpha": 0}, "must have r of 1 or more and a positive lora_alpha"),
        ({"r": True}, "must have r of 1 or more"),
        ({"r": -8}, "must have r of 1 or more"),
        ({"lora_alpha": float("nan")}, "must have r of 1 or more and a positive lora_alpha"),
        ({"lora_alpha": float("inf")}, "must have r of 1 or more and a positive lora_alpha"),
        ({"use_rslora": "false"}, "use_rslora=false: must be true or false"),
        ({"target_modules": "(q_proj"}, r"target_modules=\(q_proj: is no regular expression"),
        ({"target_modules": 5}, "target_modules=5: must be an expression or a list of names"),
        ({"target_modules": ["q_proj", 5]}, "must be an expression or a list of names"),
        ({"exclude_modules": {"q_proj": 1}}, "exclude_modules=.*must be an expression or a list"),
        ({"target_modules": None}, f"lora_adapter_path=.*{ADAPTER_CONFIG}: .*no linear map"),
        (
            {"target_modules": ["q_proj", "w"]},
            f"lora_adapter_path=.*{ADAPTER_CONFIG}: target_modules=w: no linear map .* Use an",
        ),
        ({"r": 4}, f"{RANK}: the adapter in .* has rank 4. Leave .* out, or set it to 4."),
    ],
)
def test_l13_saved_adapters_of_other_kinds_are_refused(
    tmp_path: Path, change: Mapping[str, Any], message: str
) -> None:
    """L13: one line names what the adapter has."""
    folder = write_adapter(tmp_path / "adapter", {**SAVED, **change})
    assert_refused(message, RANK, f"{MODEL}.lora_adapter_path={folder}")


@pytest.mark.parametrize(
    ("content", "weights", "message"),
    [
        ("{", True, f"{ADAPTER_CONFIG} is not valid JSON"),
        ("[]", True, f"{ADAPTER_CONFIG} is not a JSON object"),
        ("{}", True, "peft_type=None: only LORA is built"),
        (SAVED, False, f"it has no {ADAPTER_WEIGHTS}"),
    ],
)
def test_damaged_folders_are_named(
    tmp_path: Path, content: Mapping[str, Any] | str, weights: bool, message: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", content, weights=weights)
    assert_refused(message, f"{MODEL}.lora_adapter_path={folder}")


def test_a_folder_that_is_missing_or_no_adapter_is_named(tmp_path: Path) -> None:
    assert_refused(
        "no such folder. Name a folder", f"{MODEL}.lora_adapter_path={tmp_path / 'nowhere'}"
    )
    message = f"it has no {ADAPTER_CONFIG}. Name .* or global_step_N/actor of a run"
    assert_refused(message, f"{MODEL}.lora_adapter_path={tmp_path}")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("target_modules=[q_proj,lm_head]", "target_modules='lm_head': no linear map"),
        ("target_modules='.*visual.*'", "no linear map of the model's 2 layers matches it"),
        ("exclude_modules='.*'", "matches it and not exclude_modules="),
        ("target_modules='(q'", "is no regular expression"),
        ("target_modules=q_proj", r"no linear map .* List some of q_proj.*, as .q_proj,v_proj."),
        ("target_modules=[]", "no linear map of the model's 2 layers matches it"),
        ("target_modules=[all-linear,w]", "target_modules='all-linear': no linear map"),
    ],
)
def test_l13_rules_that_match_nothing_are_refused(argument: str, message: str) -> None:
    """L13: one line names the key and the rule."""
    assert_refused(message, RANK, f"{MODEL}.{argument}")


def test_a_rule_that_excludes_nothing_is_warned_of() -> None:
    exclude = f"{MODEL}.exclude_modules='.*visual.*'"
    found = adapters(RANK, exclude)
    (warning,) = found.warnings(2, model="base", sees=False)
    assert "exclude_modules=.*visual.*: it excludes nothing" in warning
    assert not list(found.warnings(2, model="base", sees=True))
    some = adapters(RANK, f"{MODEL}.exclude_modules=[q_proj]")
    assert not list(some.warnings(2, model="base", sees=False))


def assert_refused(message: str, *arguments: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        adapters(*arguments).modules(2, sees=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("lora.type=dora", "an adapter of another kind than LoRA is not built"),
        ("lora.dropout=0.1", "dropout of adapters is not built"),
        ("target_parameters=[w]", "adapters of raw parameters is not built"),
    ],
)
def test_l13_other_kinds_are_refused_by_name(argument: str, message: str) -> None:
    """L13: keys that ask for other adapters than LoRA."""
    with pytest.raises(UserError, match=message):
        config(RANK, f"{MODEL}.{argument}")


def test_l13_muon_is_refused() -> None:
    """L13: it would orthogonalise the factors."""
    with pytest.raises(UserError, match="optimizer='Muon': it would orthogonalise"):
        check_run(config(RANK, "actor_rollout_ref.actor.optim.optimizer=Muon"))
    arguments = ["model.path=base", "model.lora_rank=8", "optim.optimizer=Muon"]
    with pytest.raises(UserError, match="optim.optimizer='Muon'"):
        check_sft(load_config(SftConfig, [*arguments, "data.train_files=a"]).config)


@pytest.mark.parametrize("name", ["vllm", "sglang", "hf", "native", "auto"])
def test_adapters_over_fp8_are_refused_but_by_the_native_engine(name: str) -> None:
    rollout = "actor_rollout_ref.rollout"
    asked = config(RANK, f"{rollout}.quantization=fp8", f"{rollout}.name={name}")
    refused = [str(error) for error in unbuilt_run(asked)]
    assert len(refused) == (name not in ("native", "auto"))
    assert all(f"Set {rollout}.name=native" in one for one in refused)


def test_keys_that_adapters_do_not_read_are_listed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", SAVED)
    fsdp = "actor_rollout_ref.actor.fsdp_config.model_dtype"

    def without_effect(*arguments: str) -> Mapping[str, str]:
        loaded = load_config(RunConfig, [f"{MODEL}.path=base", *arguments])
        return make_plan(loaded).ignored_keys

    alpha = f"{MODEL}.lora_alpha"
    assert "all weights are trained" in without_effect(f"{alpha}=8")[alpha]
    assert alpha not in without_effect(RANK, f"{alpha}=8")
    path = f"{MODEL}.lora_adapter_path={folder}"
    assert "says it" in without_effect(path, f"{alpha}=8")[alpha]
    assert "float32" in without_effect(RANK, f"{fsdp}=bfloat16")[fsdp]
    seeds = ("trainer.seed=5", "data.seed=1", "actor_rollout_ref.rollout.seed=2")
    assert "trainer.seed" in without_effect(*seeds)
    assert "trainer.seed" in without_effect(*seeds, path)
    assert "trainer.seed" not in without_effect(*seeds, RANK), "it draws the adapters"


def test_a_rate_for_all_weights_is_warned_of() -> None:
    rate = "actor_rollout_ref.actor.optim.lr"
    (warning,) = adapter_warnings(config(RANK, f"{rate}=3e-6"))
    assert warning.startswith(f"{rate}=3e-06: adapters usually learn at about ten times")
    assert not list(adapter_warnings(config(RANK, f"{rate}=3e-5")))
    assert not list(adapter_warnings(config(f"{rate}=3e-6")))


def test_l15_memory_of_7b_with_rank_32() -> None:
    """L15: within 3 GiB of the figures that were computed by hand."""
    arguments = (
        f"{MODEL}.lora_rank=32",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.rollout.n=8",
        "data.train_batch_size=64",
        "data.max_prompt_length=128",
        "data.max_response_length=512",
        "trainer.device=cuda",
    )
    wanted = config(*arguments)
    found = trained_model(wanted).adapters
    assert found is not None
    number = found.num_parameters(SEVEN_BILLION)
    assert number == 80_740_352  # 32 x (inputs + outputs) of 7 maps of 28 layers
    (plan,) = plan_memory(wanted, SEVEN_BILLION).values()
    base = 2 * SEVEN_BILLION.num_parameters
    assert plan.weights == base + 6 * number
    assert (plan.gradients, plan.optimizer) == (6 * number, 8 * number)
    assert plan.reference == plan.rollout == 0
    # Base, adapters with their state, activations with logits, and keys and values, in GiB.
    by_hand = 14.2 + 1.4 + 9.6 + 14.4
    assert abs(plan.total / 1.1 / GIB - by_hand) < 3


def test_sft_has_the_same_keys() -> None:
    loaded = load_config(SftConfig, ["model.path=base", "model.lora_rank=8"]).config
    found = adapters_of(loaded.model, section="model")
    assert found is not None
    assert (found.rank, found.section) == (8, "model")
    assert not list(unbuilt_run(config(RANK)))
