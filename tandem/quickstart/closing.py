# SPDX-License-Identifier: Apache-2.0
"""The closing words of the quickstart: what was made, and what to type next. Nothing is printed."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from tandem.quickstart.materials import NUM_TEST, NUM_UNSEEN


@dataclass(frozen=True, slots=True)
class Accuracies:
    """The shares of correct answers before and after GRPO.

    Attributes:
        before, after: on problems of the training's kind.
        unseen_before, unseen_after: on numbers that occur in no training problem.
        without_tool: the same after training, with a tool that always fails; None without one.
    """

    before: float
    after: float
    unseen_before: float
    unseen_after: float
    without_tool: float | None = None


def describe_end(
    accuracies: Accuracies,
    *,
    run_folder: Path,
    model: Path,
    report: Path,
    seconds: float,
    question: str | None,
) -> str:
    """Return the sentences that a user reads at the end.

    Args:
        run_folder: the folder of the GRPO run.
        model: the folder of the trained model.
        seconds: the time that the whole quickstart took.
        question: a question that the model may be asked; None if it needs a picture.
    """
    run = shlex.quote(str(run_folder))
    unseen, asks = "scenes", ()
    if question is not None:
        unseen = "numbers"
        asks = (f"  tandem sample {run} {json.dumps(question)}", "      to ask the model something")
    lines = (
        "",
        f"In {seconds:.0f} s, a model was made, fine-tuned on examples, and trained with GRPO.",
        f"It solves {_percent(accuracies.after)} of {NUM_TEST} held-out problems; "
        f"before GRPO it solved {_percent(accuracies.before)}.",
        f"It solves {_percent(accuracies.unseen_after)} of {NUM_UNSEEN} problems with unseen "
        f"{unseen}; before, {_percent(accuracies.unseen_before)}.",
        *_without_tool(accuracies),
        "",
        f"The report is {report}. It opens in a browser.",
        f"The model is in {model}.",
        "",
        "Next, type one of these:",
        *asks,
        f"  tandem export {run} --output my-model",
        "      to write the model as a Hugging Face folder",
        "  tandem prepare gsm8k --output ~/data/gsm8k",
        "      to fetch a real data set, for tandem plan and tandem train",
        "",
    )
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _without_tool(accuracies: Accuracies) -> list[str]:
    if accuracies.without_tool is None:
        return []
    share = _percent(accuracies.without_tool)
    return [f"With a tool that always fails, it solves {share} of them."]
