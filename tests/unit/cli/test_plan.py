# SPDX-License-Identifier: Apache-2.0
"""``tandem plan``: counts rows, prints JSON or tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.cli.plan import count, run
from tandem.config.schema.data import DataConfig
from tandem.platforms.names import VARIABLE

KEYS = [
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.model.path=nobody/nothing",
]
ONE_SAMPLE = "actor_rollout_ref.rollout.n=1"  # which is warned of
PLAN = ["plan", "--elsewhere"]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" * 5)
    return str(path)


def test_json_counts_the_rows_of_the_files(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["--json", *KEYS, f"data.train_files=[{rows},{rows}]", f"data.val_files={rows}"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_train_rows"], plan["num_val_rows"]) == (10, 5)
    assert plan["steps_per_epoch"] == 5


def test_the_table_names_steps_pools_and_keys_in_vain(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"data.train_files={rows}", f"data.val_files={rows}"]
    assert run([*KEYS, *files, ONE_SAMPLE, "data.use_shm=True", "trainer.test_freq=1"]) == 0
    printed = capsys.readouterr().out
    for text in ("training steps", "60", "0, 1, 2, 3, ..., 59, 60", "data.use_shm", "warning: "):
        assert text in printed


def test_the_table_says_which_devices_of_which_node(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [
        "trainer.separated_node_tasks=[[actor-train,logp],ref_logp,generate]",
        "trainer.separated_node_ratios=[0.5,0.17,0.33]",
    ]
    devices = ["trainer.nnodes=2", "trainer.n_gpus_per_node=3", "data.val_files=[]"]
    assert (
        run([f"data.train_files={rows}", *KEYS, "actor_rollout_ref.rollout.n=4"] + groups + devices)
        == 0
    )
    printed = capsys.readouterr().out
    for text in (
        "3 device(s): 0-2 of node 0",
        "idle (ref_logp)",
        "1 device(s): 0 of node 1",
        "2 device(s): 1-2 of node 1",
        "warning: pool ref_logp: its 1 device(s) stay idle",
    ):
        assert text in printed


def test_platforms_of_pools_and_the_way_of_the_weights_are_shown(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"data.train_files={rows}",
        *KEYS,
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.n_gpus_per_node=4",
        "pools.actor-train.platform=npu",
        "pools.generate.platform=musa",
    ]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    for text in ("2 npu device(s): 0-1 of node 0", "2 musa device(s)", "actor-train -> generate"):
        assert text in printed
    assert run(["--json", *arguments]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [pool["platform"] for pool in plan["pools"]] == ["npu", "musa"]
    assert plan["weights"]["actor-train -> generate"].startswith("staged (two platforms")


def test_a_reward_model_without_a_score_is_refused_where_it_is_here(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "judge"
    arguments = [*PLAN, *KEYS, f"data.train_files={rows}", f"reward_model.model.path={folder}"]
    switched_on = [*arguments, "reward_model.enable=True"]
    assert main(switched_on) == 0
    folder.mkdir()
    described = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(described))
    assert main(arguments) == 0
    assert main(switched_on) == 2
    assert "must be sequence or token classification with one label" in capsys.readouterr().err
    described |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "score"}}
    (folder / "config.json").write_text(json.dumps(described))
    assert main(switched_on) == 0


def test_a_model_that_cannot_be_divided_is_refused_where_it_is_here(
    rows: str, tiny_policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has one key/value head."""
    layout, two = "tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"
    run_words = [*KEYS, f"data.train_files={rows}", two, "actor_rollout_ref.rollout.n=2"]
    actor = f"actor_rollout_ref.actor.fsdp_config.{layout}"
    sft_words = ["sft", f"data.train_files={rows}", "data.train_batch_size=2", two]
    for words, key, layout_key in (
        (run_words, "actor_rollout_ref.model.path", actor),
        (sft_words, "model.path", f"engine.{layout}"),
    ):
        arguments = [*PLAN, *words, f"{key}={tiny_policy_folder}"]
        assert main(arguments) == 0
        assert main([*arguments, layout_key]) == 2
        assert f"error: {layout_key}: it must divide" in capsys.readouterr().err
    elsewhere = f"actor_rollout_ref.model.path={tiny_policy_folder / 'nowhere'}"
    assert main([*PLAN, *run_words, elsewhere, actor]) == 0


def test_the_critic_is_divided_by_its_own_sizes(
    rows: str, tmp_path: Path, tiny_policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "critic.model.fsdp_config.tensor_model_parallel_size=2"
    described = json.loads((tiny_policy_folder / "config.json").read_text())
    critic = tmp_path / "critic"
    arguments = [
        *PLAN,
        *KEYS,
        f"data.train_files={rows}",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=gae",
        f"actor_rollout_ref.model.path={tiny_policy_folder}",
        layout,
    ]
    assert main(arguments) == 2
    assert f"error: {layout}: it must divide" in capsys.readouterr().err
    assert main([*arguments, f"critic.model.path={critic}"]) == 0
    critic.mkdir()
    (critic / "config.json").write_text(json.dumps(described | {"num_key_value_heads": 2}))
    assert main([*arguments, f"critic.model.path={critic}"]) == 0


def test_a_platform_that_the_environment_names_is_judged_where_it_decides(
    rows: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = [*KEYS, f"data.train_files={rows}"]
    sft = ["sft", f"data.train_files={rows}", "data.train_batch_size=2", "model.path=m"]
    for words in (train, sft):
        monkeypatch.setenv(VARIABLE, "nonsense")
        assert main([*PLAN, *words]) == 2
        assert "VERL_PLATFORM='nonsense': there is no such platform" in capsys.readouterr().err
        assert main([*PLAN, *words, "trainer.device=cpu"]) == 0
        monkeypatch.setenv(VARIABLE, "nvidia")
        assert main([*PLAN, *words]) == 0
    mixed = ["actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2"]
    mixed += ["pools.generate.platform=musa", "pools.transport=flagcx"]
    assert main([*PLAN, *train, *mixed, "trainer.nnodes=2"]) == 0
    monkeypatch.setenv(VARIABLE, "ascend")
    assert main([*PLAN, *train, *mixed, "trainer.nnodes=2"]) == 2
    assert "FlagCX connects npu to no other vendor" in capsys.readouterr().err


def test_flagcx_with_ascend_is_refused_whatever_a_third_pool_will_be(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"data.train_files={rows}",
        *KEYS,
        "trainer.n_gpus_per_node=4",
        "trainer.separated_node_tasks=[[logp,actor-train],ref_logp,generate]",
        "trainer.separated_node_ratios=[0.5,0.25,0.25]",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "pools.actor-train.platform=npu",
        "pools.generate.platform=cuda",
        "pools.transport=flagcx",
    ]
    assert main([*PLAN, *arguments]) == 2
    assert "the pools have npu and cuda, and FlagCX connects npu" in capsys.readouterr().err


def test_supervised_arguments_are_planned_behind_the_word_sft(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"data.train_files={rows}", "data.train_batch_size=2", "model.path=m"]
    arguments.append("trainer.n_gpus_per_node=2")
    assert run(["--json", "sft", *arguments]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_train_rows"], plan["steps_per_epoch"]) == (5, 2)
    assert [pool["tasks"] for pool in plan["pools"]] == [["actor-train"]]
    assert "engine" in plan["config"]


def test_files_that_cannot_be_counted_give_the_reason() -> None:
    data = DataConfig(train_files=("/nowhere/x.parquet",))
    found = count(data, validation=False)
    assert found.rows is None
    assert "data.train_files='/nowhere/x.parquet': no such file" in found.problem


def test_help_lists_the_keys_with_defaults_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "usage: tandem plan",
        "data.train_batch_size=1024",
        "Number of prompts per training step",
    ):
        assert text in printed


def test_a_model_whose_layers_cannot_be_divided_is_refused_where_it_is_here(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, two = tmp_path / "gemma", "trainer.n_gpus_per_node=2"
    arguments = [*PLAN, *KEYS, f"data.train_files={rows}", "actor_rollout_ref.rollout.n=2"]
    arguments.append(f"actor_rollout_ref.model.path={folder}")
    assert main([*arguments, two]) == 0
    unread = "no such folder here; the plan does not check its family"
    assert unread in capsys.readouterr().out
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gemma3"}')
    assert main(arguments) == 0
    assert unread not in capsys.readouterr().out
    assert main([*arguments, two]) == 0
    capsys.readouterr()
    divided = "actor_rollout_ref.actor.fsdp_config.tensor_model_parallel_size=2"
    assert main([*arguments, two, divided]) == 2
    assert "models of type 'gemma3', and divides no layer" in capsys.readouterr().err
