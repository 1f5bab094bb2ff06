# SPDX-License-Identifier: Apache-2.0
"""Times of tasks from runs and tables, and what they say of other numbers of devices."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tandem.metrics.jsonl import BEFORE_FIRST_STEP, JsonLinesFile
from tandem.planner.task_times import TaskTimes, expected_longest, measured_run, read_times

MEASURED = {"generate": {"2": 8.0}, "actor-train": {"2": 4.0}}


def table(folder: Path, content: object) -> Path:
    path = folder / "times.json"
    path.write_text(json.dumps(content))
    return path


def test_seconds_follow_what_divides_and_what_does_not() -> None:
    times = TaskTimes({"actor-train": ((2, 5.0), (4, 3.0)), "logp": ((4, 2.0),)}, (1.0,))
    assert times.seconds("actor-train", 8) == pytest.approx(2.0)
    assert times.seconds("logp", 8) == pytest.approx(1.0)
    assert times.seconds("ref_logp", 8) == 0


def test_a_fit_never_promises_negative_seconds() -> None:
    faster = TaskTimes({"actor-train": ((2, 8.0), (4, 3.0))}, (1.0,))
    assert faster.seconds("actor-train", 1000) > 0
    slower = TaskTimes({"actor-train": ((2, 3.0), (4, 4.0))}, (1.0,))
    assert slower.seconds("actor-train", 8) == pytest.approx(3.5)


def test_weights_take_the_same_time_on_any_number_of_devices() -> None:
    times = TaskTimes({"sync": ((2, 1.0), (4, 2.0))}, (1.0,))
    assert times.seconds("sync", 2) == times.seconds("sync", 64) == 1.5


def test_a_batch_alone_waits_for_its_longest_response(tmp_path: Path) -> None:
    content = {
        "generate": {"4": 9.0},
        "actor-train": {"4": 2.0},
        "sync": 0.5,
        "response_lengths": [100, 100, 400],
    }
    times = read_times([table(tmp_path, content)])
    assert times.relative_lengths == (0.5, 0.5, 2.0)
    assert times.seconds("generate", 4) == pytest.approx(4.5)
    assert times.seconds("sync", 4) == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"generate": {"2": 1.0}}, "no actor-train"),
        ({**MEASURED, "generate": {}}, "no generate"),
        ({"generate": {"2": 1.0}, "actor-train": {"2": 1.0}, "train": {"2": 1.0}}, "unknown train"),
        ({"generate": {"2": 1.0}, "actor-train": {"2": -1.0}}, "not positive"),
        ({**MEASURED, "response_lengths": [0, 0]}, "not positive"),
        ({**MEASURED, "response_lengths": [-5, 3]}, "not positive"),
        ({**MEASURED, "response_lengths": [math.nan, math.inf]}, "not positive"),
        ({"generate": {"two": 1.0}, "actor-train": {"2": 1.0}}, "must be a run folder, or a JSON"),
        ([1], "must be a run folder, or a JSON"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(
    tmp_path: Path, content: object, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_times([table(tmp_path, content)])
    assert "\n" not in str(error.value) and "Write " in str(error.value)


def run_folder(folder: Path, rows: list[dict[str, float]], *arguments: str) -> Path:
    """A finished run with these metrics by step."""
    config = load_config(RunConfig, ["trainer.n_gpus_per_node=4", *arguments]).config
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    metrics = JsonLinesFile(folder / "metrics.jsonl", keep_through_step=BEFORE_FIRST_STEP)
    for step, row in enumerate(rows, start=1):
        metrics.append({"step": step, **row})
    metrics.close()
    rollouts = JsonLinesFile(folder / "rollouts.jsonl", keep_through_step=BEFORE_FIRST_STEP)
    for length in (10, 30):
        rollouts.append({"step": len(rows), "tokens": ["a"] * length})
    rollouts.close()
    return folder


SYNCHRONOUS = {"timing_s/gen": 6.0, "timing_s/update_actor": 3.0, "timing_s/step": 10.0}


def test_a_synchronous_run_has_its_times_on_all_its_devices(tmp_path: Path) -> None:
    rows = [{**SYNCHRONOUS, "timing_s/gen": 60.0}, SYNCHRONOUS, SYNCHRONOUS]
    found = measured_run(run_folder(tmp_path, rows))
    # The longest response is 1.5 times the mean.
    assert found.times.measured["generate"] == ((4, 4.0),)
    assert found.times.measured["actor-train"] == ((4, 3.0),)
    assert found.step_s == 10.0


def test_the_longest_response_is_that_of_a_step_though_few_are_recorded(tmp_path: Path) -> None:
    row = {**SYNCHRONOUS, "response_length/mean": 25.0, "response_length/max": 100.0}
    found = measured_run(run_folder(tmp_path, [row, row])).times
    assert found.relative_lengths == (0.5, 1.5)
    assert found.longest == 4.0
    assert found.measured["generate"] == ((4, 6.0 / 4),)


def test_a_synchronous_run_tells_what_a_decode_step_takes(tmp_path: Path) -> None:
    """Which then says what engines take that always have enough to do, whatever else is known."""
    row = {
        **SYNCHRONOUS,
        "response_length/mean": 100.0,
        "perf/decode_step_s/fixed": 0.002,
        "perf/decode_step_s/per_sequence": 0.0001,
    }
    keys = (
        "data.train_batch_size=40",
        "actor_rollout_ref.rollout.n=10",
        "actor_rollout_ref.rollout.max_num_seqs=50",
    )
    run = run_folder(tmp_path, [row, row], *keys)
    times = read_times([table(tmp_path, MEASURED), run])
    assert times.decoding is not None
    assert times.decoding.mean_tokens == 100.0
    assert times.decoding.pace.step_s(20) == pytest.approx(0.004)
    # 100 sequences of 100 tokens on each of 4 engines, 50 at a time: 200 steps of 0.007 s.
    assert times.seconds("generate", 4) == pytest.approx(1.4)
    planned = load_config(RunConfig, [*keys[:2], "actor_rollout_ref.rollout.max_num_seqs=25"])
    assert times.planned(planned.config).seconds("generate", 4) == pytest.approx(400 * 0.0045)


def test_without_it_what_was_under_way_at_a_time_is_known_of_busy_engines(tmp_path: Path) -> None:
    row = {
        "pipeline/busy_s/generate": 5.0,
        "pipeline/idle_share/generate": 0.01,
        "pipeline/busy_s/actor-train": 3.0,
        "pipeline/wall_s": 5.1,
    }
    keys = (
        "trainer.separated_node_tasks=[[actor-train,logp],generate]",
        "trainer.separated_node_ratios=[0.5,0.5]",
        "data.train_batch_size=40",
        "actor_rollout_ref.rollout.n=10",
        "actor_rollout_ref.rollout.max_num_seqs=50",
    )
    (tmp_path / "busy").mkdir()
    busy = measured_run(run_folder(tmp_path / "busy", [row, row], *keys)).times
    assert busy.rows_share == 100 / 400
    assert busy.planned(load_config(RunConfig, []).config) == busy
    alone = measured_run(run_folder(tmp_path, [SYNCHRONOUS, SYNCHRONOUS], *keys[2:])).times
    assert alone.rows_share == 1.0


def test_training_takes_as_long_as_policy_and_critic_together(tmp_path: Path) -> None:
    row = {**SYNCHRONOUS, "timing_s/values": 0.5, "timing_s/update_critic": 2.0}
    found = measured_run(run_folder(tmp_path, [row, row]))
    assert found.times.measured["actor-train"] == ((4, 5.5),)


def test_an_asynchronous_run_has_its_times_on_each_pool(tmp_path: Path) -> None:
    row = {
        "pipeline/busy_s/generate": 5.0,
        "pipeline/idle_share/generate": 0.01,
        "pipeline/busy_s/actor-train": 3.0,
        "pipeline/wall_s": 5.1,
    }
    groups = (
        "trainer.separated_node_tasks=[[actor-train,logp],generate]",
        "trainer.separated_node_ratios=[0.75,0.25]",
    )
    found = measured_run(run_folder(tmp_path, [row, row], *groups))
    assert found.times.measured["generate"] == ((1, 5.0),)
    assert found.times.measured["actor-train"] == ((3, 3.0),)
    assert found.step_s == 5.1


@pytest.mark.parametrize(("idle_share", "longest"), [(0.65, 1.0), (0.9, 1.5)])
def test_generation_that_pauses_for_training_is_not_short_of_work(
    tmp_path: Path, idle_share: float, longest: float
) -> None:
    """Of 6 s it was paused for 3.9, which is all it idled, or not."""
    row = {
        "pipeline/busy_s/generate": 2.0,
        "pipeline/idle_share/generate": idle_share,
        "pipeline/wait_s/generate/update": 3.9,
        "pipeline/busy_s/actor-train": 3.8,
        "pipeline/wall_s": 6.0,
    }
    groups = (
        "trainer.separated_node_tasks=[[actor-train,logp,generate]]",
        "trainer.separated_node_ratios=[1.0]",
        "trainer.n_gpus_per_node=1",
    )
    found = measured_run(run_folder(tmp_path, [row, row], *groups))
    assert found.times.measured["generate"] == ((1, pytest.approx(2.0 / longest)),)


@pytest.mark.parametrize(("num_engines", "longest"), [(1, 1.5), (2, (1.5 + 0.5) / 2)])
def test_engines_with_little_to_do_wait_for_the_longest_of_their_share(
    tmp_path: Path, num_engines: int, longest: float
) -> None:
    row = {
        "pipeline/busy_s/generate": 3.0,
        "pipeline/idle_share/generate": 0.5,
        "pipeline/busy_s/actor-train": 6.0,
        "pipeline/wall_s": 6.0,
    }
    share = num_engines / 4
    groups = (
        "trainer.separated_node_tasks=[[actor-train,logp],generate]",
        f"trainer.separated_node_ratios=[{1 - share},{share}]",
    )
    found = measured_run(run_folder(tmp_path, [row, row], *groups))
    assert found.times.measured["generate"] == ((num_engines, pytest.approx(3.0 / longest)),)


@pytest.mark.parametrize("num_shares", [1, 2, 3, 6])
def test_the_longest_of_a_share_is_the_mean_over_all_shares(num_shares: int) -> None:
    lengths = (1.0, 2.0, 2.0, 5.0, 7.0, 20.0)
    shares = list(itertools.combinations(lengths, 6 // num_shares))
    mean = statistics.fmean(max(share) for share in shares)
    assert expected_longest(lengths, num_shares) == pytest.approx(mean)


def test_a_run_of_one_step_has_no_times(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two steps or more"):
        measured_run(run_folder(tmp_path, [SYNCHRONOUS]))


def test_runs_on_other_numbers_of_devices_are_fitted_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_folder(folder, [SYNCHRONOUS, SYNCHRONOUS])
    other = table(tmp_path, {"generate": {"8": 3.0}, "actor-train": {"8": 2.0}})
    times = read_times([folder, other])
    assert times.seconds("actor-train", 8) == pytest.approx(2.0)
    assert times.seconds("actor-train", 16) == pytest.approx(1.5)
