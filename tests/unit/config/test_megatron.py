# SPDX-License-Identifier: Apache-2.0
"""verl's keys of Megatron with tandem's engine: each has an effect, a reason or an error (MO15)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.config.check import mcore_rules
from tandem.config.check.device_rules import mcore_key, require_division
from tandem.config.check.ignored_keys import ignored_keys, key_effects
from tandem.config.check.mcore_rules import require_megatron_core
from tandem.config.check.rules import check_run
from tandem.config.derived.experts import ExpertConfig
from tandem.config.derived.latent import LatentConfig
from tandem.config.derived.pools import place_run, place_sft
from tandem.config.parse.keys import in_override_grammar, keys_of
from tandem.config.parse.overrides import load_config
from tandem.config.schema.megatron import MEGATRON_IGNORED, MEGATRON_UNBUILT, OVERRIDES, SPELLINGS
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError
from tests.fakes.configured import TINY

ACTOR = "actor_rollout_ref.actor"
STRATEGY = f"{ACTOR}.strategy=megatron"
SIZES = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 2,
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 3,
    f"{OVERRIDES}.num_layers_in_first_pipeline_stage": 5,
    "param_offload": True,
    "optimizer_offload": True,
    "dtype": "float32",
    "backend": "mcore",
}
OVERRIDDEN = f"{ACTOR}.megatron.{OVERRIDES}"


def load(*words: str):
    return load_config(RunConfig, words)


def test_mo16_the_strategies_resolve_to_one_layout() -> None:
    """Compare whole configurations: the same sizes in both sections are the same run."""
    theirs = [f"{ACTOR}.megatron.{name}={value}" for name, value in SIZES.items()]
    ours = [f"{SPELLINGS[f'{ACTOR}.megatron.{name}']}={value}" for name, value in SIZES.items()]
    found = load(STRATEGY, *theirs).config.model_dump()
    expected = load(*ours).config.model_dump()
    assert found["actor_rollout_ref"]["actor"].pop("strategy") == "megatron"
    assert expected["actor_rollout_ref"]["actor"].pop("strategy") == "fsdp"
    assert found == expected
    assert found["actor_rollout_ref"]["ref"]["fsdp_config"]["ulysses_sequence_parallel_size"] == 2


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if ".megatron." in name])
def test_mo15_a_key_of_the_layout_is_read_with_its_strategy_only(spelling: str) -> None:
    value = {"dtype": "float32", "load_weight": "False", "backend": "mcore"}.get(
        spelling.rpartition(".")[2]
    )
    value = value or ("True" if spelling.endswith(("offload", "router")) else "2")
    read = load(STRATEGY, f"{spelling}={value}")
    assert read.set_keys[SPELLINGS[spelling]] == spelling and read.warnings == ()
    name = SPELLINGS[spelling]
    assert key_effects(read)[spelling].startswith((f"read as {name}: ", "no effect: "))
    unread = load(f"{spelling}={value}")
    assert ignored_keys(unread)[spelling].endswith("strategy=megatron")
    assert unread.config == RunConfig()


def test_mo15_the_learning_rate_of_megatrons_keys_is_that_of_tandems() -> None:
    optim = f"{ACTOR}.optim"
    rates = (f"{optim}.lr=2e-6", f"{optim}.lr_warmup_steps=5", f"{optim}.min_lr=5e-7")
    theirs = load(
        STRATEGY,
        *rates,
        f"{optim}.lr_decay_style=cosine",
        f"{optim}.lr_warmup_init=0",
        f"{optim}.lr_decay_steps=null",
        f"{optim}.weight_decay_incr_style=constant",
    )
    ours = load(*rates, f"{optim}.lr_scheduler_type=cosine")
    found = theirs.config.actor_rollout_ref.actor.optim
    assert found == ours.config.actor_rollout_ref.actor.optim and found.final_ratio == 0.25
    effects = key_effects(theirs)
    assert effects[f"{optim}.lr_decay_style"].startswith(f"read as {optim}.lr_scheduler_type: ")
    assert effects[f"{optim}.min_lr"].startswith("Final learning rate")
    constant = load(STRATEGY, *rates, f"{optim}.lr_decay_style=constant")
    assert f"{optim}.min_lr" in ignored_keys(constant)
    with pytest.raises(UserError, match=r"lr_decay_style='cosine': a schedule .* is not built"):
        load(f"{optim}.lr_decay_style=cosine")


def test_a_rate_does_not_fall_to_a_larger_one() -> None:
    optim = f"{ACTOR}.optim"
    rates = (f"{optim}.lr=2e-6", f"{optim}.min_lr=3e-6")
    check_run(load(*rates).config)
    with pytest.raises(UserError, match=r"min_lr=3e-06: .* from .*lr=2e-06\. Set .*min_lr=2e-06"):
        check_run(load(*rates, f"{optim}.lr_scheduler_type=cosine").config)


def test_mo15_a_frozen_router_is_verls_key() -> None:
    section = f"{ACTOR}.megatron.override_mcore_model_config"
    for word in (
        f"{section}.moe_config.freeze_moe_router=True",
        f"{section}={{moe_config:{{freeze_moe_router:true}}}}",
    ):
        assert load(STRATEGY, word).config.actor_rollout_ref.actor.freeze_moe_router


def test_mo15_the_order_of_words_does_not_matter_and_files_say_the_strategy_too(tmp_path) -> None:
    key = f"{ACTOR}.megatron.tensor_model_parallel_size"
    (tmp_path / "recipe.yaml").write_text(f"{key}: 2\n{ACTOR}.strategy: megatron\n")
    for words in ([f"{key}=2", STRATEGY], [STRATEGY, f"{key}=2"], [str(tmp_path / "recipe.yaml")]):
        layout = load(*words).config.actor_rollout_ref.actor.fsdp_config
        assert layout.tensor_model_parallel_size == 2
    back = load(STRATEGY, f"{key}=2", f"{ACTOR}.strategy=fsdp").config
    assert back.actor_rollout_ref.actor.fsdp_config.tensor_model_parallel_size == 1


@pytest.mark.parametrize("name", sorted(MEGATRON_IGNORED.keys() - SPELLINGS.keys()))
def test_mo15_a_key_without_effect_has_its_reason(name: str) -> None:
    default, reason = MEGATRON_IGNORED[name]
    assert len(reason.split()) > 2
    value = "5" if default == {} else in_override_grammar(default)
    words = [f"{name}.any=1"] if default == {} else [f"{name}={value}"]
    if value == "":
        return
    assert list(ignored_keys(load(STRATEGY, *words)).values()) == [reason]


def test_mo15_each_key_that_is_refused_is_named() -> None:
    for name, unbuilt in MEGATRON_UNBUILT.items():
        with pytest.raises(UserError) as refused:
            load(STRATEGY, f"{name}=7")
        text = str(refused.value)
        assert text.startswith(f"{name}=7: {unbuilt.capability} is not built") and "\n" not in text
        assert keys_of(RunConfig)[name].unbuilt == unbuilt


def test_mo15_defaults_are_verls() -> None:
    own = f"{ACTOR}.megatron."
    defaults = {name.removeprefix(own): key.default for name, key in keys_of(RunConfig).items()}
    expected = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "use_mbridge": True,
        "vanilla_mbridge": False,
        "param_offload": False,
        "grad_offload": False,
        "optimizer_offload": False,
        "use_dist_checkpointing": False,
        "dist_checkpointing_path": None,
        "seed": 42,
    }
    assert {name: defaults[name] for name in expected} == expected


REFUSED = [
    (f"+{OVERRIDDEN}.moe_zz_loss_coeff=1", f"{OVERRIDDEN}.moe_zz_loss_coeff=1: no such key. Did "
     f"you mean {OVERRIDDEN}.moe_z_loss_coeff?"),
    (f"+{OVERRIDDEN}.moe_aux_loss_coeff=0.001", "an auxiliary loss of routers is not built."),
    (f"{OVERRIDDEN}.account_for_loss_in_pipeline_split=True",
     "a split into stages that is not by numbers of layers is not built."),
    (f"+{OVERRIDDEN}.moe_router_dtype=fp64",
     f"{OVERRIDDEN}.moe_router_dtype='fp64': a router in another precision than fp32 is not built. "
     f"Leave the key out, or set {OVERRIDDEN}.moe_router_dtype=fp32."),
    (f"{ACTOR}.megatron.tensor_parallel_size=2", "Did you mean"),
    *((f"{ACTOR}.megatron.{name}={value}",
       f"{ACTOR}.megatron.{name}={value}: must be at least 1. Set {ACTOR}.megatron.{name}=")
      for name, value in (("tensor_model_parallel_size", -1), ("expert_model_parallel_size", -2),
                          ("pipeline_model_parallel_size", 0), ("context_parallel_size", -1),
                          ("expert_tensor_parallel_size", 0))),
    (f"{ACTOR}.megatron.tensor_model_parallel_size=True",
     f"{ACTOR}.megatron.tensor_model_parallel_size=True: must be a number"),
    (f"{ACTOR}.optim.lr_decay_style=linear", f"{ACTOR}.optim.lr_decay_style='linear': must be"),
    (f"{ACTOR}.optim.weight_decay_incr_style=linear", "a weight decay that changes is not built."),
    ("critic.megatron.override_mcore_model_config.moe_config.freeze_moe_router=True",
     "a frozen router of another model than the policy is not built."),
    (f"{ACTOR}.optim.lr_warmup_init=0.1", "a warm-up that does not begin at 0 is not built."),
    (f"{ACTOR}.megatron.backend=mcor", f"Set {ACTOR}.megatron.backend=native (the default)."),
]  # fmt: skip


@pytest.mark.parametrize(("word", "text"), REFUSED)
def test_mo15_wrong_keys_are_one_line(word: str, text: str) -> None:
    with pytest.raises(UserError) as refused:
        load(STRATEGY, word)
    assert text in str(refused.value) and "\n" not in str(refused.value)
    assert "passes an unknown key" not in str(refused.value) or "tensor_parallel_size" in word


@pytest.mark.parametrize("model", ["critic", "reward_model"])
def test_mo15_a_strategy_of_one_model_alone_does_not_leave_its_sizes_without_effect(model) -> None:
    alone, size = f"{model}.strategy=megatron", f"{model}.megatron.tensor_model_parallel_size"
    with pytest.raises(UserError) as refused:
        load(alone, f"{size}=2")
    assert str(refused.value) == (
        f"{size}=2: {alone} does not read it; {STRATEGY} does, for all models. "
        f"Set {model}.model.fsdp_config.tensor_model_parallel_size=2 or {STRATEGY}."
    )
    assert load(alone, f"{size}=1").config == load(f"{size}=2").config == RunConfig()
    found = load(alone, f"{size}=2", STRATEGY).config.model_dump()
    assert found[model]["model"]["fsdp_config"]["tensor_model_parallel_size"] == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("tensor_model_parallel_size=3",), "megatron.tensor_model_parallel_size=3: must divide"),
        (("context_parallel_size=8",), "megatron.context_parallel_size=8: must divide"),
        (("expert_model_parallel_size=3",), "megatron.expert_model_parallel_size=3: must divide"),
        (
            ("pipeline_model_parallel_size=3",),
            "megatron.pipeline_model_parallel_size=3: must divide the 4 device(s)",
        ),
        (
            ("pipeline_model_parallel_size=2", "tensor_model_parallel_size=4"),
            "tensor_model_parallel_size=4: must divide the 2 device(s) of each of 2 stages",
        ),
        (("pipeline_model_parallel_size=4",), "there are more stages than the 2 layers"),
        (
            ("pipeline_model_parallel_size=2", f"{OVERRIDES}.num_layers_in_first_pipeline_stage=2"),
            "num_layers_in_first_pipeline_stage=2: it leaves 0 of 2 layers to 1 other stage(s)",
        ),
        (
            (f"{OVERRIDES}.num_layers_in_last_pipeline_stage=1",),
            "there is one stage, as actor_rollout_ref.actor.megatron.pipeline_model_parallel_",
        ),
        (
            ("expert_model_parallel_size=2",),
            "the model has no experts to divide. Leave out "
            f"{ACTOR}.megatron.expert_model_parallel_size.",
        ),
    ],
)
def test_mo15_sizes_that_do_not_divide_name_the_keys_that_were_written(words, text: str) -> None:
    own = [f"{ACTOR}.megatron.{word}" for word in words]
    config = load(STRATEGY, "trainer.n_gpus_per_node=4", *own).config
    with pytest.raises(UserError) as refused:
        check_run(config)
        require_division(config, place_run(config), models={"actor-train": TINY})
    assert text in str(refused.value) and "fsdp_config" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "it trains on two devices or more"),
        (
            ("trainer.n_gpus_per_node=2", f"{ACTOR}.megatron.context_parallel_size=2"),
            "context parallelism of Megatron needs Transformer Engine",
        ),
        (
            ("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=8"),
            "adapters (LoRA) are not built for it",
        ),
        (
            (
                "trainer.n_gpus_per_node=2",
                "actor_rollout_ref.model.recompute_granularity=pointwise",
            ),
            "it recomputes whole layers only",
        ),
    ],
)
def test_mo18_what_megatron_core_does_not_compute_is_one_line(words, text: str) -> None:
    config = load(STRATEGY, f"{ACTOR}.megatron.backend=mcore", *words).config
    with pytest.raises(UserError) as refused:
        require_division(config, place_run(config), models={"actor-train": TINY})
    message = str(refused.value)
    assert text in message and "\n" not in message
    assert message.startswith(f"{ACTOR}.megatron.backend='mcore': ")
    assert message.endswith(f"Set {ACTOR}.megatron.backend=native.")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"experts": ExpertConfig(8, 2, inner=32)},
            "a layer with experts of Megatron needs Transf",
        ),
        ({"latent": LatentConfig(16, 8, 8, 16)}, "latent attention is not built for it"),
    ],
)
def test_mo18_layers_that_megatron_core_does_not_compute_are_one_line(change, text: str) -> None:
    words = (STRATEGY, f"{ACTOR}.megatron.backend=mcore", "trainer.n_gpus_per_node=2")
    config = load(*words).config
    with pytest.raises(UserError, match=text) as refused:
        require_division(config, place_run(config), models={"actor-train": replace(TINY, **change)})
    message = str(refused.value)
    assert message.endswith(f"Set {ACTOR}.megatron.backend=native.") and "\n" not in message


def test_mo18_megatron_core_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (STRATEGY, f"{ACTOR}.megatron.backend=mcore", "trainer.n_gpus_per_node=2")
    config = load(*words).config
    key = mcore_key(config, place_run(config))
    assert key == f"{ACTOR}.megatron.backend"
    monkeypatch.setattr(mcore_rules, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'megatron-core>=0.16'"):
        require_megatron_core(key, platform="any", runs_megatron=True)
    monkeypatch.setattr(mcore_rules, "find_spec", lambda name: name.startswith("megatron") or None)
    require_megatron_core(key, platform="cuda", runs_megatron=True)
    with pytest.raises(UserError, match="on npu it needs the package mindspeed, which is not inst"):
        require_megatron_core(key, platform="npu", runs_megatron=True, adaptor="mindspeed")
    with pytest.raises(UserError, match="the platform is cpu"):
        require_megatron_core(key, platform="cpu", runs_megatron=False)
    native = load(words[-1]).config
    require_megatron_core(mcore_key(native, place_run(native)), platform="cpu", runs_megatron=False)


def test_mo18_errors_name_the_section_that_asks_for_megatron_core() -> None:
    supervised = load_config(SftConfig, ["engine.backend=mcore"]).config
    assert mcore_key(supervised, place_sft(supervised)) == "engine.backend"
    ours = f"{ACTOR}.fsdp_config.backend"
    config = load(f"{ours}=mcore", "trainer.n_gpus_per_node=2").config
    assert mcore_key(config, place_run(config)) == ours


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_mo18_trained_weights_of_megatron_core_are_fp32(dtype: str) -> None:
    own = f"{ACTOR}.fsdp_config"
    words = (f"{own}.backend=mcore", "trainer.n_gpus_per_node=2", f"{own}.model_dtype={dtype}")
    config = load(*words).config
    with pytest.raises(UserError) as refused:
        require_division(config, place_run(config), models={"actor-train": TINY})
    assert str(refused.value) == (
        f"{own}.model_dtype={dtype!r}: {own}.backend=mcore stores the weights of its layers in "
        f"float32 only. Set {own}.model_dtype=float32."
    )


def test_mo16_a_reference_with_stages_of_its_own_inherits_no_layers_of_a_stage() -> None:
    first = f"{OVERRIDES}.num_layers_in_first_pipeline_stage=3"
    words = [STRATEGY, f"{ACTOR}.megatron.pipeline_model_parallel_size=2"]
    words.append(f"{ACTOR}.megatron.{first}")
    roles = load(*words).config.actor_rollout_ref
    assert roles.ref.fsdp_config.num_layers_in_first_pipeline_stage == 3
    words.append("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1")
    roles = load(*words).config.actor_rollout_ref
    assert roles.ref.fsdp_config.num_layers_in_first_pipeline_stage is None
    assert roles.actor.fsdp_config.num_layers_in_first_pipeline_stage == 3


def test_mo15_the_actor_decides_whether_weights_are_loaded() -> None:
    for section in ("actor_rollout_ref.ref", "critic"):
        key = f"{section}.megatron.load_weight"
        reason = ignored_keys(load(STRATEGY, f"{key}=False"))[key]
        assert reason == "actor_rollout_ref.actor.load_weight decides for both models"
    key = "reward_model.megatron.load_weight"
    reason = ignored_keys(load(STRATEGY, f"{key}=False"))[key]
    assert reason == "a reward model's weights are always loaded"
