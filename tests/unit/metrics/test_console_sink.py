# SPDX-License-Identifier: Apache-2.0
"""verl's console line, exactly."""

import io

from tandem.metrics.console_sink import ConsoleSink
from tandem.types import StepReport


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
