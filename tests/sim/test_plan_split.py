# SPDX-License-Identifier: Apache-2.0
"""``tandem plan --times``: what it suggests, that what it suggests can be planned, and how well a
run is predicted from its own times.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.cli.plan import plan_arguments
from tandem.cli.plan_times import run
from tandem.config.schema.run import RunConfig
from tandem.metrics.jsonl import BEFORE_FIRST_STEP, JsonLinesFile
from tandem.planner.advice import configured_seconds, forecast_rows
from tandem.planner.engines import SimulatedTimes
from tandem.planner.simulation import SimulatedSetup, simulate, simulated_config
from tandem.planner.task_times import read_times

BAD_SPLIT = (
    "trainer.n_gpus_per_node=4",
    "trainer.separated_node_tasks=[[logp,actor-train],ref_logp,generate]",
    "trainer.separated_node_ratios=[0.5,0.25,0.25]",
)
KEYS = (
    "actor_rollout_ref.model.path=nobody/nothing",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "data.val_files=[]",
)


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "times.json"
    times = {"generate": {"4": 8.0}, "actor-train": {"4": 4.0}, "ref_logp": {"4": 2.0}, "sync": 0.2}
    path.write_text(json.dumps(times))
    return str(path)


def suggested(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["suggestion"]


def test_a_bad_split_is_improved_and_the_arguments_bring_it_about(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = suggested(capsys, f"--times={table}", *KEYS, *BAD_SPLIT)
    assert found["devices"]["generate"] == 2
    assert found["step_s"] < 0.5 * found["step_s_as_configured"]
    improved = plan_arguments([*KEYS, BAD_SPLIT[0], *found["overrides"]]).config
    assert isinstance(improved, RunConfig)
    times = read_times([Path(table)])
    assert configured_seconds(improved, times) == pytest.approx(found["step_s"])


def test_ratios_that_are_no_decimals_leave_no_device_over(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = (BAD_SPLIT[1], "trainer.n_gpus_per_node=6")
    ratios = "trainer.separated_node_ratios=[0.66666,0.16667,0.16667]"
    found = suggested(capsys, f"--times={table}", *KEYS, *tasks, ratios)
    assert sum(found["devices"].values()) == 6
    improved = plan_arguments([*KEYS, *tasks, *found["overrides"]])
    assert isinstance(improved.config, RunConfig)
    times = read_times([Path(table)])
    assert configured_seconds(improved.config, times) == pytest.approx(found["step_s"])


def test_a_run_on_shared_devices_is_offered_two_halves(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = suggested(capsys, "--times", table, *KEYS, "trainer.n_gpus_per_node=2")
    assert list(found["devices"]) == ["actor-train+ref_logp", "generate"]
    assert found["step_s_as_configured"] == pytest.approx(2 * (8 + 4 + 2) + 0.2, rel=0.02)


def test_the_reference_is_moved_to_where_devices_idle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    times = {"generate": {"2": 4.5}, "actor-train": {"2": 8.8}, "ref_logp": {"2": 2.9}}
    path.write_text(json.dumps(times))
    halves = (
        "trainer.n_gpus_per_node=4",
        "trainer.separated_node_tasks=[[actor-train,ref_logp],generate]",
        "trainer.separated_node_ratios=[0.5,0.5]",
        "trainer.async_pipeline=True",
        "trainer.generate_ahead_steps=2",
    )
    found = suggested(capsys, f"--times={path}", *KEYS, *halves)
    assert found["devices"] == {"actor-train": 2, "generate+ref_logp": 2}
    assert found["step_s_as_configured"] == pytest.approx(8.8 + 2.9, rel=0.05)
    assert found["step_s"] == pytest.approx(8.8, rel=0.02)
    moved = plan_arguments([*KEYS, *halves[:1], *found["overrides"]])
    assert isinstance(moved.config, RunConfig)
    predicted = configured_seconds(moved.config, read_times([path]))
    assert predicted == pytest.approx(found["step_s"])


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.rollout.partial_rollout=False", "trainer.deterministic_async=True"]
)
def test_no_lag_is_suggested_that_a_group_cannot_have(
    table: str, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    shared = (
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
        "trainer.separated_node_ratios=[1.0]",
    )
    found = suggested(capsys, f"--times={table}", *KEYS, *shared, key)
    improved = plan_arguments([*KEYS, shared[0], key, *found["overrides"]])
    assert isinstance(improved.config, RunConfig)
    if len(found["devices"]) == 1:
        assert found["lag"] == 0


def test_keys_of_verl_for_devices_that_generate_do_not_contradict_what_is_suggested(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--config-name=fully_async_ppo_trainer",
        *KEYS,
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=0",
        "rollout.total_rollout_steps=51200",
        "async_training.staleness_threshold=0.5",
    ]
    found = suggested(capsys, f"--times={table}", *words)
    improved = plan_arguments([*words, *found["overrides"]])
    assert isinstance(improved.config, RunConfig)
    assert improved.config.trainer.num_devices == sum(found["devices"].values()) == 16
    assert improved.config.trainer.batches_ahead == found["lag"]


def test_a_mode_of_verl_does_not_contradict_what_is_suggested(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *KEYS,
        "trainer.n_gpus_per_node=4",
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
    ]
    found = suggested(capsys, f"--times={table}", *words)
    improved = plan_arguments([*words, *found["overrides"]])
    assert isinstance(improved.config, RunConfig)
    assert improved.config.trainer.num_devices == sum(found["devices"].values()) == 8
    assert improved.config.trainer.batches_ahead == found["lag"]


def test_the_table_for_readers_ends_in_arguments_to_copy_if_they_help(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["plan", f"--times={table}", *KEYS, "trainer.n_gpus_per_node=2"]
    assert main([*shared, "actor_rollout_ref.hybrid_engine=False"]) == 0
    printed = capsys.readouterr().out
    texts = ("Suggested split", "step as configured", "left out: memory", "\narguments: trainer.s")
    for text in texts:
        assert text in printed
    assert main(shared) == 0
    assert "no split is faster than the configured one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--times=",), "--times='': must name a run folder or a table"),
        (("--times=nowhere.json",), "--times='nowhere.json': must be a run folder, or a JSON"),
        (("--times={table}",), "trainer.n_gpus_per_node=1: 1 device(s) cannot be divided among 2"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], message: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [argument.replace("{table}", table) for argument in arguments]
    assert main(["plan", *words, *KEYS]) == 2
    assert message in capsys.readouterr().err


def test_a_task_without_times_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"generate": {"4": 8.0}, "actor-train": {"4": 4.0}}))
    assert main(["plan", f"--times={path}", *KEYS, "trainer.n_gpus_per_node=4"]) == 2
    assert "holds no times of ref_logp" in capsys.readouterr().err


def recorded(folder: Path, *, generate_s: float, update_s: float) -> Path:
    """The folder of a simulated asynchronous run on 2 + 2 devices."""
    config = simulated_config(
        num_prompts=4,
        num_samples=2,
        lag=2,
        num_steps=12,
        further=("trainer.n_gpus_per_node=4", "actor_rollout_ref.hybrid_engine=False"),
    )
    seconds = {"actor-train": update_s, "sync": 0.2}
    times = SimulatedTimes(
        response_s=lambda uid, k: generate_s,
        task_s=lambda task, _: seconds.get(task, 0.0),
        num_slots=8,
    )
    groups = (("actor-train", "logp", "ref_logp"), ("generate",))
    made = simulate(config, times, setup=SimulatedSetup(groups=groups, num_rows=52))
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    metrics = JsonLinesFile(folder / "metrics.jsonl", keep_through_step=BEFORE_FIRST_STEP)
    for _, report in made.rows:
        metrics.append({"step": report.step, **report.metrics})
    metrics.close()
    return folder


@pytest.mark.parametrize(("generate_s", "update_s"), [(8.0, 3.0), (3.0, 8.0), (5.0, 5.0)])
def test_a_run_is_predicted_from_its_own_times(
    tmp_path: Path, generate_s: float, update_s: float
) -> None:
    rows = dict(forecast_rows(recorded(tmp_path, generate_s=generate_s, update_s=update_s)))
    predicted = float(rows["step, predicted from its task times"].split()[0])
    achieved = float(rows["step, achieved (median wall time)"].split()[0])
    assert predicted == pytest.approx(achieved, rel=0.05)
    assert float(rows["overlap: busiest pool / step"]) > 0.9


DEVICES = 2
ROLES = ("actor-train", "logp", "ref_logp", "generate")
BATCH = 16 * 8
TURNS = (
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
)


def step_s(running: int) -> float:
    """Of decoding on both devices: each has half of the sequences."""
    return 0.02 + 0.002 * running / DEVICES


def long_tailed(uid: int, k: int) -> float:
    """Decode steps of a response: 500 in the mean, 3200 at most."""
    share = ((uid * 8 + k) * 37 % BATCH + 0.5) / BATCH
    return min(-500 * math.log(share), 3200.0)


def on_all_devices(folder: Path, *, lag: int, num_rows: int) -> tuple[Path, float]:
    """The folder of a simulated run of long-tailed responses on two devices that do everything, and
    the seconds of its steps in the long run.
    """
    keys = (
        f"trainer.n_gpus_per_node={DEVICES}",
        f"actor_rollout_ref.rollout.max_num_seqs={num_rows}",
        *(TURNS if lag else ()),
    )
    num_steps = 12 + 2 * lag
    config = simulated_config(
        num_prompts=16, num_samples=8, lag=lag, num_steps=num_steps, further=keys
    )
    seconds = {"actor-train": 20.0, "sync": 0.2}
    times = SimulatedTimes(
        response_s=long_tailed,
        task_s=lambda task, _: seconds.get(task, 0.0),
        num_slots=min(num_rows * DEVICES, BATCH * (lag + 1)),
        num_tokens=lambda steps: max(round(steps), 1),
        decode_step_s=1.0,
        slowdown=step_s,
    )
    setup = SimulatedSetup(groups=(ROLES,), num_rows=16 * num_steps, num_engines=DEVICES)
    made = simulate(config, times, setup=setup)
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    metrics = JsonLinesFile(folder / "metrics.jsonl", keep_through_step=BEFORE_FIRST_STEP)
    for _, report in made.rows:
        metrics.append({"step": report.step, **report.metrics})
    metrics.close()
    rollouts = JsonLinesFile(folder / "rollouts.jsonl", keep_through_step=BEFORE_FIRST_STEP)
    for completion in made.samples[num_steps]:
        rollouts.append({"step": num_steps, "tokens": ["a"] * len(completion.token_ids)})
    rollouts.close()
    return folder, made.step_seconds(after=4 + lag, through=num_steps - lag)


def test_turns_are_suggested_and_predicted_from_a_synchronous_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    colocated, turns = tmp_path / "colocated", tmp_path / "turns"
    colocated.mkdir()
    turns.mkdir()
    folder, synchronous_s = on_all_devices(colocated, lag=0, num_rows=64)
    keys = (
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.max_num_seqs=48",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.rollout.partial_rollout=keep_cache",
        "data.val_files=[]",
        f"trainer.n_gpus_per_node={DEVICES}",
    )
    found = suggested(capsys, f"--times={folder}", *keys)
    assert found["devices"] == {"actor-train+generate": DEVICES}
    assert found["lag"] > 0
    assert found["step_s_as_configured"] == pytest.approx(synchronous_s, rel=0.02)
    improved = plan_arguments([*keys, *found["overrides"]]).config
    assert isinstance(improved, RunConfig)
    _, achieved_s = on_all_devices(turns, lag=found["lag"], num_rows=48)
    assert found["step_s"] == pytest.approx(achieved_s, rel=0.05)
    assert found["step_s"] >= 0.99 * found["floor_s"]
    assert achieved_s < 0.9 * synchronous_s
    alone = suggested(capsys, f"--times={folder}", *keys, "trainer.n_gpus_per_node=1")
    assert alone["devices"] == {"actor-train+generate": 1}
    assert alone["lag"] > 0
    whole = "actor_rollout_ref.rollout.partial_rollout=False"
    apart = suggested(capsys, f"--times={folder}", *keys, whole)
    assert apart["devices"] == {"actor-train": 1, "generate": 1}


def test_what_is_no_asynchronous_run_has_no_forecast(tmp_path: Path) -> None:
    assert forecast_rows(tmp_path) == []
