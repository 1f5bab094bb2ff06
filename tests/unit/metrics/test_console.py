# SPDX-License-Identifier: Apache-2.0
"""The console: verl's line exactly, and the bar of a terminal."""

import io

from tandem.metrics.console import ConsoleSink, ProgressSink, compact_line
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
    sink = ProgressSink(terminal, total_steps=10, first_step=4)
    sink.write(StepReport(5, {"critic/score/mean": 0.5, "perf/throughput": 1000.0}))
    sink.close()
    sink.close()

    shown = terminal.getvalue()
    assert "step 5  reward 0.5  1000 tok/s" in shown
    assert "5/10" in shown


def test_brackets_in_names_are_not_markup():
    terminal = _Terminal()
    sink = ProgressSink(terminal, total_steps=2, first_step=0)
    sink.write(StepReport(1, {"val-core/[/red]x/reward/mean@1": 0.5}))
    sink.close()

    assert "val [/red]x 0.5" in terminal.getvalue()


def test_the_line_is_verls():
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.write(StepReport(0, {"val-core/gsm8k/reward/mean@1": 0.25}))
    sink.write(StepReport(1, {"critic/score/mean": 1 / 3, "actor/lr": 5e-07, "bad": float("nan")}))
    sink.close()

    assert stream.getvalue().splitlines() == [
        "step:0 - val-core/gsm8k/reward/mean@1:0.25",
        "step:1 - critic/score/mean:0.3333333333333333 - actor/lr:5e-07 - bad:nan",
    ]


def test_a_validation_that_ends_late_moves_no_bar():
    terminal = _Terminal()
    sink = ProgressSink(terminal, total_steps=10, first_step=0)
    sink.write(StepReport(7, {"critic/score/mean": 0.5}))
    sink.write(StepReport(5, {"val-core/some/reward/mean@1": 0.25}))
    sink.close()

    shown = terminal.getvalue()
    assert "step 5  val some 0.25" in shown
    assert "7/10" in shown and "5/10" not in shown
