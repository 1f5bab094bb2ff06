# SPDX-License-Identifier: Apache-2.0
"""The console: verl's line exactly, and the bar of a terminal."""

import io
import logging

from tandem.metrics.activity import Activity, Phase
from tandem.metrics.console import LINE_WIDTH, LineSink, ProgressSink, VerlSink, compact_line
from tandem.types import StepReport


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_compact_line_has_what_one_looks_at():
    metrics = {
        "critic/score/mean": 0.51234,
        "critic/score/max": 1.0,
        "response_length/mean": 25.31,
        "actor/grad_norm": 0.4,
        "perf/throughput": 94350.0,
        "perf/time_per_step": 0.161,
        "val-core/openai/gsm8k/reward/mean@1": 0.25,
    }

    line = compact_line(StepReport(3, metrics))

    assert line == (
        "step 3  reward 0.512  length 25.3  grad 0.4  94.3k tok/s  0.161 s  val openai/gsm8k 0.25"
    )


def test_an_asynchronous_run_shows_its_wall_time_and_who_was_idle():
    metrics = {
        "perf/time_per_step": 3.0,
        "pipeline/wall_s": 4.0,
        "pipeline/idle_share/generate": 0.25,
        "pipeline/idle_share/actor-train": 0.1,
        "training/lag/mean": 1.5,
    }
    line = compact_line(StepReport(7, metrics))
    assert line == "step 7  4 s  idle: generate 0.25  train 0.1  lag 1.5"


def test_supervised_runs_show_their_loss():
    line = compact_line(StepReport(9, {"train/loss": 1.25, "val/loss": 1.5, "train/lr": 1e-3}))

    assert line == "step 9  loss 1.25  val loss 1.5"


def test_the_bar_moves_and_ends_where_it_stands():
    terminal = _Terminal()
    sink = ProgressSink(terminal, total_steps=10, first_step=4, activity=Activity())
    sink.write(StepReport(5, {"critic/score/mean": 0.5, "perf/throughput": 1000.0}))
    sink.close()
    sink.close()

    shown = terminal.getvalue()
    assert "step 5  reward 0.5  1000 tok/s" in shown
    assert "5/10" in shown


def test_a_line_that_is_too_long_loses_whole_fields_from_its_end():
    metrics = {"critic/score/mean": 0.5, "response_length/mean": 25.0, "actor/grad_norm": 0.4}
    report = StepReport(3, metrics)

    assert compact_line(report, width=40) == "step 3  reward 0.5  length 25  grad 0.4"
    assert compact_line(report, width=38) == "step 3  reward 0.5  length 25"
    assert compact_line(report, width=3) == "step 3"


def test_the_two_divergences_have_names_of_their_own():
    line = compact_line(StepReport(1, {"actor/ppo_kl": 0.25, "actor/kl_loss": 0.5}))

    assert line == "step 1  kl ref 0.5  kl old 0.25"


def test_a_step_is_one_line_of_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal = _Terminal()
    sink = ProgressSink(terminal, total_steps=10, first_step=0, activity=Activity())
    metrics = {f"val-core/source{number}/reward/mean@1": 0.25 for number in range(9)}
    sink.write(StepReport(1, {"critic/score/mean": 0.5, **metrics}))
    sink.close()

    (line,) = [line for line in terminal.getvalue().splitlines() if "val source0" in line]
    assert line.strip().endswith("val source2 0.25")
    assert "elapsed, -:-- left" in terminal.getvalue()


def test_log_messages_go_above_the_bar_while_it_is_shown(monkeypatch):
    terminal, stderr = _Terminal(), _Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    handler = logging.StreamHandler(stderr)
    logging.getLogger().addHandler(handler)
    try:
        sink = ProgressSink(terminal, total_steps=2, first_step=0, activity=Activity())
        logging.getLogger().warning("a reward printed this")
        sink.close()
        logging.getLogger().warning("the run has ended")
    finally:
        logging.getLogger().removeHandler(handler)
    assert "a reward printed this\n" in terminal.getvalue()
    assert stderr.getvalue() == "the run has ended\n"


def test_brackets_in_names_are_not_markup():
    terminal = _Terminal()
    sink = ProgressSink(terminal, total_steps=2, first_step=0, activity=Activity())
    sink.write(StepReport(1, {"val-core/[/red]x/reward/mean@1": 0.5}))
    sink.close()

    assert "val [/red]x 0.5" in terminal.getvalue()


def test_a_line_elsewhere_has_the_time_and_at_most_160_characters():
    stream = io.StringIO()
    sink = LineSink(stream, total_steps=2000, clock=lambda: "12:34:56")
    metrics = {
        "critic/score/mean": 1 / 3,
        "response_length/mean": 123.456,
        "actor/entropy": 0.123456,
        "actor/kl_loss": 0.00123456,
        "actor/ppo_kl": 0.00123456,
        "actor/grad_norm": 0.98765,
        "perf/throughput": 12345.678,
        "perf/time_per_step": 12.3456,
        "pipeline/idle_share/generate": 0.5,
        "pipeline/idle_share/actor-train": 0.25,
        "training/lag/mean": 1.5,
        **{f"val-core/source-{k}/acc/mean@1": 0.5 for k in range(9)},
    }
    sink.write(StepReport(1000, metrics))
    sink.close()

    (line,) = stream.getvalue().splitlines()
    assert line.startswith("12:34:56 step 1000/2000  reward 0.333  length 123")
    assert 100 < len(line) <= LINE_WIDTH


def test_the_line_is_verls():
    stream = io.StringIO()
    sink = VerlSink(stream)
    sink.write(StepReport(0, {"val-core/gsm8k/reward/mean@1": 0.25}))
    sink.write(StepReport(1, {"critic/score/mean": 1 / 3, "actor/lr": 5e-07, "bad": float("nan")}))
    sink.close()

    assert stream.getvalue().splitlines() == [
        "step:0 - val-core/gsm8k/reward/mean@1:0.25",
        "step:1 - critic/score/mean:0.333333 - actor/lr:5e-07 - bad:nan",
    ]


def test_a_validation_that_ends_late_moves_no_bar():
    terminal = _Terminal()
    sink = ProgressSink(terminal, total_steps=10, first_step=0, activity=Activity())
    sink.write(StepReport(7, {"critic/score/mean": 0.5}))
    sink.write(StepReport(5, {"val-core/some/reward/mean@1": 0.25}))
    sink.close()

    shown = terminal.getvalue()
    assert "step 5  val some 0.25" in shown
    assert "7/10" in shown and "5/10" not in shown


def test_the_bar_shows_the_phase_that_the_run_is_in_when_it_is_drawn(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal, activity, generated = _Terminal(), Activity(), [0]
    sink = ProgressSink(terminal, total_steps=1000, first_step=999, activity=activity)
    with activity.during(Phase.GENERATING, total=1280, done=lambda: generated[0]):
        for generated[0] in (212, 1279):
            sink._progress.refresh()
    sink.close()

    shown = terminal.getvalue()
    assert "left  generating 212/1280" in shown and "left  generating 1279/1280" in shown
    assert "generating" not in shown.splitlines()[-2], "nothing of it is left in the end"


def test_a_pipe_shows_no_phase():
    stream, activity = io.StringIO(), Activity()
    sink = LineSink(stream, total_steps=2, clock=lambda: "12:34:56")
    with activity.during(Phase.SAVING):
        sink.write(StepReport(1, {"critic/score/mean": 0.5}))
    sink.close()

    assert stream.getvalue() == "12:34:56 step 1/2  reward 0.5\n"


def test_a_run_that_only_validates_shows_the_step_of_its_checkpoint():
    report = StepReport(4, {"val-core/gsm8k/acc/mean@1": 0.5})
    assert compact_line(report, total_steps=0) == "step 4  val gsm8k 0.5"
