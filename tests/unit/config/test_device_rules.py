# SPDX-License-Identifier: Apache-2.0
"""How runs must not be spread over devices: each error names key, value, rule and remedy."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from pydantic import BaseModel

from tandem.config.check.device_rules import require_division
from tandem.config.check.rules import check_run, check_sft
from tandem.config.derived.pools import place_run
from tandem.config.derived.sizes import ModelSizes
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError
from tests.fakes.configured import TINY

ACTOR = "actor_rollout_ref.actor"
LAYOUT = f"{ACTOR}.fsdp_config"
REF = "actor_rollout_ref.ref.fsdp_config"
EIGHT = "trainer.n_gpus_per_node=8"
KL = f"{ACTOR}.use_kl_loss=True"
SPLIT = (
    "trainer.separated_node_tasks=[[logp,actor-train],ref_logp,generate]",
    "trainer.separated_node_ratios=[0.5,0.25,0.25]",
)
SMALL = ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=2")
ONE_SAMPLE = "actor_rollout_ref.rollout.n=1"


def problem(schema: type[BaseModel], *arguments: str) -> str | None:
    """The one line that these arguments are refused with."""
    try:
        config = load_config(schema, arguments).config
        if isinstance(config, SftConfig):
            check_sft(config)
        else:
            assert isinstance(config, RunConfig)
            check_run(config)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


@pytest.mark.parametrize(
    ("tasks", "ratios", "message"),
    [
        ("[[logp,train],generate]", "[0.5,0.5]", "'train' is not a task. Name each of actor-train"),
        ("[actor-train,generate,generate]", "[0.2,0.2,0.2]", "'generate' is named more than once"),
        ("[[actor-train,logp]]", "[1.0]", "generate is missing, and this run needs it. Add it"),
        (
            "[logp,generate]",
            "[0.5,0.5]",
            "actor-train is missing, and this run needs it. Add it to a group.",
        ),
        ("[actor-train,generate]", "[0.5,0.5]", "logp is missing, and this run needs it. Add it"),
        ("[[actor-train,logp],generate]", "[0.5]", "must have one ratio for each of the 2 groups"),
        ("[[actor-train,logp],generate]", "[0.6,0.6]", "must add up to at most 1. Set trainer.sep"),
        ("[[actor-train,logp],generate]", "[1.0,0.0]", "must be positive. Raise the ratios that"),
        ("[[actor-train,logp],[generate],[]]", "[0.4,0.3,0.3]", "],[generate],[]]: a group is emp"),
        ("[]", "[1.0]", "separated_node_tasks is missing. Name a group of tasks there for each"),
    ],
)
def test_02_groups_that_make_no_sense_are_refused(tasks: str, ratios: str, message: str) -> None:
    said = problem(
        RunConfig,
        f"trainer.separated_node_tasks={tasks}",
        f"trainer.separated_node_ratios={ratios}",
    )
    assert said is not None and said.startswith("trainer.separated_node_") and message in said


def test_02_a_group_without_tasks_is_refused_in_one_line_as_it_was_written() -> None:
    said = problem(
        RunConfig,
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp],[generate],[]]",
        "trainer.separated_node_ratios=[0.34,0.33,0.33]",
        "trainer.n_gpus_per_node=3",
    )
    assert said == (
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp],[generate],[]]: a group is "
        "empty. Name its tasks, or remove it and its ratio."
    )


@pytest.mark.parametrize(
    ("ratios", "lower"),
    [
        ("8,4,4", "0.5,0.25,0.25"),
        ("0.6,0.6,0.6", "0.34,0.33,0.33"),
        ("0.9,0.3,0.3", "0.6,0.2,0.2"),
        ("1e308,1e308,1e308", "0.34,0.33,0.33"),
        ("1e-9,1,1", "0.34,0.33,0.33"),
    ],
)
def test_02_ratios_above_1_are_scaled_to_ones_that_leave_no_device_idle(
    ratios: str, lower: str
) -> None:
    def run(ratios: str) -> tuple[str, ...]:
        return (*SPLIT[:1], KL, f"trainer.separated_node_ratios=[{ratios}]", EIGHT)

    said = problem(RunConfig, *run(ratios))
    assert said is not None and said.endswith(f"Set trainer.separated_node_ratios=[{lower}].")
    assert problem(RunConfig, *run(lower)) is None
    pools = place_run(load_config(RunConfig, run(lower)).config).pools
    assert sum(pool.num_devices for pool in pools) == 8


def test_02_no_devices_are_counted_for_a_ratio_that_none_suffice_for() -> None:
    said = problem(
        RunConfig, *SPLIT[:1], KL, "trainer.separated_node_ratios=[0.5,1e-300,0.5]", EIGHT
    )
    assert said is not None and said.endswith("none of 8 devices. Raise its ratio.")


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("ratios", ["[nan]", "[0.5,inf,0.2]", "0.5", "null", "[half]", "[]"])
def test_02_the_remedy_of_ratios_that_are_none_fits_the_groups(number: int, ratios: str) -> None:
    groups = ["[actor-train,logp]", "generate", "ref_logp"]
    if number == 1:
        groups = ["[actor-train,logp,ref_logp,generate]"]
    run = (f"trainer.separated_node_tasks=[{','.join(groups[:number])}]", EIGHT)
    with pytest.raises(UserError) as caught:
        check_run(load_config(RunConfig, [*run, f"trainer.separated_node_ratios={ratios}"]).config)
    said = str(caught.value)
    assert said.startswith("trainer.separated_node_ratios") and "\n" not in said
    if ratios == "[]":
        assert f"Write {number} numbers above 0" in said
        return
    (remedy,) = re.findall(r"Set (trainer\.separated_node_ratios=\[[\d.,]+\])", said)
    assert problem(RunConfig, *run, remedy) is None


def test_02_the_remedy_of_a_key_of_groups_leaves_none_of_the_two_alone() -> None:
    key, ratios = "trainer.separated_node_tasks=generate", "trainer.separated_node_ratios=[0.5,0.5]"
    with pytest.raises(UserError, match=r"Write groups like .*, or leave both keys out\.$"):
        load_config(RunConfig, [key, ratios])
    with pytest.raises(UserError, match=r"Set trainer\.separated_node_tasks=\[\] \(the default"):
        load_config(RunConfig, [key])
    with pytest.raises(UserError, match=r"Set trainer\.separated_node_ratios=\[\] \(the default"):
        load_config(RunConfig, ["trainer.separated_node_ratios=[nan]"])


def test_tasks_need_a_group_only_if_the_run_performs_them() -> None:
    groups = (
        "trainer.separated_node_tasks=[actor-train,generate]",
        "trainer.separated_node_ratios=[0.5,0.5]",
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.ppo_mini_batch_size=1024",
    )
    assert problem(RunConfig, *groups) is None
    said = problem(RunConfig, *groups, KL)
    assert said is not None and "ref_logp is missing, and this run needs it" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["actor_rollout_ref.hybrid_engine=False"], "hybrid_engine=False: needs a device to"),
        (
            [*SPLIT, "trainer.n_gpus_per_node=2"],
            "separated_node_ratios=[0.5,0.25,0.25]: gives ['generate'] none of 2 devices",
        ),
        (
            [EIGHT, f"{LAYOUT}.tensor_model_parallel_size=3"],
            f"{LAYOUT}.tensor_model_parallel_size=3: must divide the 8 device(s) of actor-train",
        ),
        (
            [EIGHT, f"{LAYOUT}.ulysses_sequence_parallel_size=3"],
            f"{LAYOUT}.ulysses_sequence_parallel_size=3: must divide the 8 device(s)",
        ),
        (
            [
                EIGHT,
                f"{LAYOUT}.tensor_model_parallel_size=4",
                f"{LAYOUT}.ulysses_sequence_parallel_size=4",
            ],
            f"times {LAYOUT}.tensor_model_parallel_size=4, divide the 8 device(s)",
        ),
        (
            [*SPLIT, KL, EIGHT, f"{REF}.tensor_model_parallel_size=4"],
            f"{REF}.tensor_model_parallel_size=4: must divide the 2 device(s) of ref_logp",
        ),
        ([EIGHT, f"{LAYOUT}.fsdp_size=3"], f"{LAYOUT}.fsdp_size=3: must divide the 8 device(s) of"),
        ([EIGHT, f"{LAYOUT}.fsdp_size=0"], "or be -1 for all"),
        (
            [EIGHT, f"{LAYOUT}.tensor_model_parallel_size=2", f"{LAYOUT}.fsdp_size=3"],
            f"{LAYOUT}.fsdp_size=3: must divide the 8 device(s) of actor-train+logp+generate / ",
        ),
        (
            [EIGHT, ONE_SAMPLE, *SMALL],
            f"{ACTOR}.ppo_mini_batch_size=2: times actor_rollout_ref.rollout.n=1 must give each of "
            "8 data-parallel ranks a sequence.",
        ),
        (
            ["trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.n=2", *SMALL[:1]]
            + [f"{ACTOR}.ppo_mini_batch_size=1"],
            "must give each of 4 data-parallel ranks a sequence. Set "
            f"{ACTOR}.ppo_mini_batch_size=2 or fewer devices.",
        ),
        (
            [EIGHT, ONE_SAMPLE, *SMALL, "trainer.separated_node_ratios=[0.25,0.75]"]
            + ["trainer.separated_node_tasks=[[logp,actor-train],generate]"],
            "data.train_batch_size=4: must give each data-parallel rank of generate work: 6",
        ),
        (
            [EIGHT, KL, ONE_SAMPLE, *SMALL]
            + ["trainer.separated_node_tasks=[[logp,actor-train,generate],ref_logp]"]
            + ["trainer.separated_node_ratios=[0.25,0.75]"],
            "data.train_batch_size=4: must give each data-parallel rank of ref_logp work",
        ),
        (
            [
                EIGHT,
                f"{LAYOUT}.ulysses_sequence_parallel_size=2",
                "data.max_prompt_length=1024",
                "data.max_response_length=1024",
                f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
            ],
            "=1000: must times ulysses_sequence_parallel_size=2 hold one sequence of",
        ),
    ],
)
def test_02_what_does_not_divide_or_suffice_is_refused_and_the_remedy_works(
    arguments: list[str], message: str
) -> None:
    said = problem(RunConfig, *arguments)
    assert said is not None and message in said
    for _ in range(3):
        if said is not None:
            remedies = re.findall(r"[\w.]+=[\w./-]*\w", said.partition("Set ")[2])
            arguments = [*arguments, remedies[0]]
            said = problem(RunConfig, *arguments)
    assert said is None


SIZES = replace(TINY, num_heads=8, head_dim=8)


@pytest.mark.parametrize(
    ("key", "models", "message"),
    [
        (
            f"{LAYOUT}.tensor_model_parallel_size=4",
            {"actor-train": SIZES},
            f"{LAYOUT}.tensor_model_parallel_size=4: it must divide the model's 8 attention heads, "
            "2 key/value heads and feed-forward width of 128. Use 1 or 2.",
        ),
        (
            f"{LAYOUT}.tensor_model_parallel_size=2",
            {"actor-train": replace(SIZES, inner=127)},
            "2 key/value heads and feed-forward width of 127. Use 1.",
        ),
        (
            f"{LAYOUT}.ulysses_sequence_parallel_size=4",
            {"actor-train": replace(SIZES, num_heads=6)},
            f"{LAYOUT}.ulysses_sequence_parallel_size=4: it must divide the 6 attention heads of a "
            "process, and divide its 2 key/value heads or be a multiple of them. Use 1 or 2 or 6.",
        ),
        (
            f"{REF}.tensor_model_parallel_size=4",
            {"actor-train": SIZES, "ref_logp": SIZES},
            f"{REF}.tensor_model_parallel_size=4: it must divide",
        ),
        (
            "critic.model.fsdp_config.tensor_model_parallel_size=4",
            {"actor-train": SIZES, "critic": SIZES},
            "critic.model.fsdp_config.tensor_model_parallel_size=4: it must divide",
        ),
    ],
)
def test_a_model_must_divide_as_its_ranks_do(
    key: str, models: dict[str, ModelSizes], message: str
) -> None:
    config = load_config(RunConfig, [EIGHT, KL, "algorithm.adv_estimator=gae", key]).config
    check_run(config)
    with pytest.raises(UserError, match=re.escape(message)):
        require_division(config, place_run(config), models=models)
    task = [*models][-1]
    fitting = replace(SIZES, num_heads=8, num_kv_heads=8)
    require_division(config, place_run(config), models={**models, task: fitting})
    require_division(config, place_run(config), models={**models, task: None})


def test_batches_need_not_divide_by_the_ranks() -> None:
    """verl refuses them; here micro-batches of any number are dealt."""
    odd = ("data.train_batch_size=9", f"{ACTOR}.ppo_mini_batch_size=9", EIGHT)
    assert problem(RunConfig, *odd) is None


def test_the_tokens_of_a_long_sequence_may_lie_on_several_devices() -> None:
    long = (
        EIGHT,
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
    )
    said = problem(RunConfig, *long)
    assert said is not None and "must hold one sequence" in said
    assert problem(RunConfig, *long, f"{LAYOUT}.ulysses_sequence_parallel_size=2") is None


def test_weights_that_generate_score_whole_sequences() -> None:
    arguments = (
        EIGHT,
        f"{LAYOUT}.ulysses_sequence_parallel_size=2",
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
        "trainer.separated_node_ratios=[0.5,0.5]",
    )
    with_trainer = "trainer.separated_node_tasks=[[actor-train,logp],generate]"
    assert problem(RunConfig, *arguments, with_trainer) is None
    apart = "trainer.separated_node_tasks=[actor-train,[logp,generate]]"
    said = problem(RunConfig, *arguments, apart)
    assert said is not None
    assert said.startswith("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1024: must ho")


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.nccl_timeout",
        "actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb",
        "actor_rollout_ref.rollout.param_update_consume_bucket_size_mb",
        "trainer.ray_wait_register_center_timeout",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        f"{LAYOUT}.tensor_model_parallel_size",
        f"{LAYOUT}.ulysses_sequence_parallel_size",
    ],
)
def test_02_sizes_and_deadlines_are_positive(key: str) -> None:
    said = problem(RunConfig, f"{key}=0")
    assert said is not None and "=0: must be at least 1. Set " in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine.tensor_model_parallel_size=3"], "engine.tensor_model_parallel_size=3: must div"),
        (
            ["engine.ulysses_sequence_parallel_size=3"],
            "engine.ulysses_sequence_parallel_size=3: must div",
        ),
        (["engine.fsdp_size=3"], "engine.fsdp_size=3: must divide the 8 device(s) of actor-train"),
        (["data.train_batch_size=4"], "data.train_batch_size=4: must give each of 8 data-parallel"),
    ],
)
def test_supervised_runs_have_the_same_rules(arguments: list[str], message: str) -> None:
    said = problem(SftConfig, EIGHT, *arguments)
    assert said is not None and message in said
    remedy = re.findall(r"[\w.]+=[\w-]+", said.partition("Set ")[2])[0]
    assert problem(SftConfig, EIGHT, *arguments, remedy) is None
    assert problem(SftConfig, EIGHT) is None
