# SPDX-License-Identifier: Apache-2.0
"""What is not built for models with experts is refused in one line, before a weight is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.config.check.device_rules import require_division
from tandem.config.check.rules import check_run
from tandem.config.derived.experts import ExpertConfig
from tandem.config.derived.latent import LatentConfig
from tandem.config.derived.pools import place_run, place_sft
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError
from tandem.rollout.choice import problem_of
from tests.fakes.configured import TINY

EXPERTS = replace(TINY, experts=ExpertConfig(8, 2, inner=32))
ROLES = "actor_rollout_ref"
MODE = f"{ROLES}.actor.router_replay.mode"
RECORDS = f"{ROLES}.rollout.enable_rollout_routing_replay"
REFUSED = [
    ((f"{ROLES}.model.lora_rank=8",), f"{ROLES}.model.target_modules='all-linear': adapters"),
    (
        (f"{ROLES}.model.lora_rank=8", f"{ROLES}.model.target_modules=[q_proj,up_proj]"),
        "adapters (LoRA) of the feed-forward are not built for models with experts. Set "
        f"{ROLES}.model.target_modules=[q_proj,k_proj,v_proj,o_proj].",
    ),
    ((f"{ROLES}.rollout.quantization=fp8",), f"{ROLES}.rollout.quantization='fp8': it is not"),
]


def problem(schema, arguments) -> str:
    config = load_config(schema, arguments).config
    placement = place_run(config) if schema is RunConfig else place_sft(config)
    require_division(config, placement, models={"actor-train": TINY})
    with pytest.raises(UserError) as raised:
        require_division(config, placement, models={"actor-train": EXPERTS})
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_not_built_for_experts(arguments, text):
    assert text in problem(RunConfig, arguments)


DIVIDED = f"{ROLES}.actor.fsdp_config.expert_model_parallel_size"
SPLIT = f"{ROLES}.actor.fsdp_config.expert_tensor_parallel_size"
SIX = replace(TINY, experts=ExpertConfig(6, 2, inner=32))


@pytest.mark.parametrize(
    ("words", "sizes", "text"),
    [
        ((f"{DIVIDED}=8",), EXPERTS, f"{DIVIDED}=8: must divide the 8 experts of a layer and the 4 "
         f"device(s) that hold the weights once. Set {DIVIDED}=4."),
        ((f"{DIVIDED}=4",), SIX, f"{DIVIDED}=4: must divide the 6 experts of a layer and the 4 "
         f"device(s) that hold the weights once. Set {DIVIDED}=2."),
        ((f"{DIVIDED}=4", f"{ROLES}.actor.fsdp_config.fsdp_size=2"), EXPERTS,
         f"and the 2 device(s) that hold the weights once. Set {DIVIDED}=2."),
        ((f"{DIVIDED}=2", f"{SPLIT}=4"), EXPERTS, f"{DIVIDED}=2: times {SPLIT}=4 must divide the 8 "
         f"experts of a layer and the 4 device(s) that hold the weights once. Set {DIVIDED}=4 and "
         f"{SPLIT}=1."),
        ((f"{SPLIT}=2",), TINY, f"{SPLIT}=2: the model has no experts to divide. Leave out"),
        ((f"{DIVIDED}=2",), TINY, f"the model has no experts to divide. Leave out {DIVIDED}."),
    ],
)  # fmt: skip
def test_mo15_experts_that_do_not_divide_are_refused(words, sizes, text):
    config = load_config(RunConfig, ["trainer.n_gpus_per_node=4", *words]).config
    with pytest.raises(UserError) as raised:
        require_division(config, place_run(config), models={"actor-train": sizes})
    assert text in str(raised.value) and "\n" not in str(raised.value)


ROLLOUT = f"{ROLES}.rollout.expert_parallel_size"
TENSORS = f"{ROLES}.rollout.tensor_model_parallel_size"
BOTH = ("trainer.n_gpus_per_node=4", f"{ROLLOUT}=2")
TURNS = (
    f"{ROLES}.hybrid_engine=False",
    "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
    "trainer.async_pipeline=True",
    "trainer.generate_ahead_steps=1",
)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("trainer.n_gpus_per_node=4", f"{ROLLOUT}=3"), f"{ROLLOUT}=3: must divide the 4 device(s) "
         f"that generate. Set {ROLLOUT}=2."),
        ((f"{ROLLOUT}=2",), f"{ROLLOUT}=2: must divide the 1 device(s) that generate. Set "
         f"{ROLLOUT}=1."),
        ((*BOTH, f"{ROLES}.rollout.name=vllm"), f"{ROLLOUT}=2: with vLLM, it must be the devices "
         f"of an engine ({TENSORS}=1). Set {TENSORS}=2, or leave out {ROLLOUT}."),
        ((*BOTH, f"{ROLES}.rollout.name=hf"), f"{ROLLOUT}=2: only vLLM and the native engine "
         f"divide experts, not rollout.name=hf. Set {ROLES}.rollout.name=native, or leave it out."),
        ((*BOTH, f"{ROLES}.hybrid_engine=False"), f"{ROLLOUT}=2: it is built for devices that "
         f"train and generate, and generation has its own. Leave out {ROLLOUT}."),
        ((*BOTH, *TURNS), f"{ROLLOUT}=2: it is built for generation and training that follow each "
         f"other in every step. Set trainer.async_pipeline=False, or leave out {ROLLOUT}."),
        ((*BOTH, f"{ROLES}.rollout.multi_turn.function_tool_path=tools.py"), f"{ROLLOUT}=2: it is "
         "built for responses of one turn, and there are tools, users or agents. Leave out"),
        ((*BOTH, f"{ROLES}.model.lora_rank=8"), f"{ROLLOUT}=2: it is not built for adapters"),
    ],
)  # fmt: skip
def test_experts_are_not_divided_in_generation(words, text):
    with pytest.raises(UserError) as raised:
        check_run(load_config(RunConfig, words).config)
    assert text in str(raised.value) and "\n" not in str(raised.value)


def test_an_engine_of_vllm_divides_experts_over_its_devices_where_native_ones_do_not():
    """A process returns what its engine draws if it is the first of the engine."""
    words = [*BOTH, f"{ROLES}.rollout.name=vllm", f"{TENSORS}=2", f"{ROLES}.hybrid_engine=False"]
    config = load_config(RunConfig, words).config
    check_run(config)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.ranks_per_engine, rollout.expert_peers) == (2, 1)
    assert [rollout.answers(rank) for rank in range(4)] == [True, False, True, False]
    native = load_config(RunConfig, BOTH).config.actor_rollout_ref.rollout
    assert (native.ranks_per_engine, native.expert_peers) == (2, 2)
    assert all(native.answers(rank) for rank in range(4))


@pytest.mark.parametrize(
    ("size", "sizes", "text"),
    [
        (4, SIX, f"{ROLLOUT}=4: must divide the 6 experts of a layer. Set {ROLLOUT}=2."),
        (2, TINY, f"{ROLLOUT}=2: the model has no experts to divide. Leave out {ROLLOUT}."),
    ],
)
def test_generation_divides_what_the_model_has(size, sizes, text):
    config = load_config(RunConfig, ["trainer.n_gpus_per_node=4", f"{ROLLOUT}={size}"]).config
    check_run(config)
    with pytest.raises(UserError) as raised:
        require_division(config, place_run(config), models={"actor-train": sizes})
    assert text in str(raised.value) and "\n" not in str(raised.value)


def test_matrices_of_experts_are_not_split_but_experts_are_divided_over_more_devices():
    words = ["trainer.n_gpus_per_node=4", f"{DIVIDED}=2", f"{SPLIT}=2"]
    placement = place_run(load_config(RunConfig, words).config)
    assert placement.layouts["actor-train"].expert_parallel == 4
    placement = place_run(load_config(RunConfig, [*words, f"{SPLIT}=null"]).config)
    assert placement.layouts["actor-train"].expert_parallel == 2


LATENT = LatentConfig(key_rank=16, plain=8, rotated=8, value=16)


@pytest.mark.parametrize("experts", [None, EXPERTS.experts])
def test_adapters_of_latent_attention_are_refused(experts):
    sizes = replace(TINY, experts=experts, latent=LATENT)
    config = load_config(RunConfig, [f"{ROLES}.model.lora_rank=8"]).config
    with pytest.raises(UserError) as raised:
        require_division(config, place_run(config), models={"actor-train": sizes})
    assert str(raised.value) == (
        f"{ROLES}.model.lora_rank=8: adapters (LoRA) are not built for models with latent "
        f"attention. Leave out {ROLES}.model.lora_rank."
    )


def test_supervised_runs_are_refused_alike():
    assert problem(SftConfig, ["model.lora_rank=8"]).startswith("model.target_modules=")


def test_adapters_of_attention_are_accepted():
    words = (f"{ROLES}.model.lora_rank=8", f"{ROLES}.model.target_modules=[q_proj,o_proj]")
    config = load_config(RunConfig, words).config
    place = place_run(config)
    assert require_division(config, place, models={"actor-train": EXPERTS}) is None


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        ("hf", ""),
        (
            "vllm",
            "; with experts it computes qwen3_moe, qwen2_moe, mixtral, olmoe, glm4_moe, dots1, "
            "XdgMoE",
        ),
        ("sglang", "; with experts it computes qwen3_moe, dots1, XdgMoE"),
    ],
)
def test_engines_with_weights_of_their_own_compute_the_families_that_were_compared(name, computed):
    found = problem_of(name, {"model_type": "deepseek_v3"})
    assert found is not None
    assert found.reason == f"experts of 'deepseek_v3' are not sent to this engine yet{computed}"
    assert problem_of("native", {"model_type": "deepseek_v3"}) is None


def test_servers_get_no_experts():
    found = problem_of("vllm", {"model_type": "qwen3_moe"}, is_elsewhere=True)
    assert found is not None
    assert found.reason == "experts of 'qwen3_moe' are not sent to this engine yet"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((f"{MODE}=R3",), f"{MODE}='R3': replays what the rollout records, and {RECORDS}=False"),
        ((f"{RECORDS}=True",), f"{RECORDS}=True: nothing reads the experts that it records"),
        ((f"{MODE}=R2", f"{RECORDS}=True"), f"reads the experts that it records, as {MODE}=R2."),
        (
            (f"{MODE}=R2", "algorithm.rollout_correction.bypass_mode=True"),
            f"{MODE}='R2': replays the pass that computes old log-probs, and algorithm.",
        ),
    ],
)
def test_mo8_keys_of_replay_must_agree(words, text):
    with pytest.raises(UserError) as raised:
        check_run(load_config(RunConfig, words).config)
    assert text in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("engine", ["megatron.", "veomni.", ""])
def test_mo15_verls_names_of_replay_are_one_key(engine):
    words = (f"{ROLES}.actor.{engine}router_replay.mode=R3", f"{RECORDS}=True")
    config = load_config(RunConfig, words).config
    check_run(config)
    assert config.actor_rollout_ref.actor.router_replay.mode == "R3"
