# SPDX-License-Identifier: Apache-2.0
"""The rules of mathematics beside verl's own, on generated answers of which the truth is known.

It needs a checkout of verl and the packages of verl's rules (pylatexenc, mathruler). It imports
verl's rules alone, without verl's own dependencies.

    PYTHONPATH=. python benchmarks/math_rules_against_verl.py --verl FOLDER [--count 10000]

The result is the number of answers for each pair of verdicts, by source and truth. The pair that
must not occur is that verl and a person say right and tandem does not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from tandem.rewards.routing import find_rule
from tests.fakes.answer_forms import Response, draw_responses

RIGHT_SCORE = 0.5
NUM_EXAMPLES = 3


def main() -> None:
    """Compare, print the table, and write it to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", required=True, help="a checkout of verl")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    verl = load_verl_rules(Path(arguments.verl))
    counts: Counter[str] = Counter()
    examples: dict[str, list[list[str]]] = defaultdict(list)
    for response in draw_responses(arguments.seed, arguments.count):
        kind = _verdicts(response, verl)
        counts[kind] += 1
        if len(examples[kind]) < NUM_EXAMPLES:
            examples[kind].append([response.form, response.text, response.ground_truth])
    for kind, count in sorted(counts.items()):
        sys.stdout.write(f"{count:6d}  {kind}\n")
    result = {
        "benchmark": "math_rules_against_verl",
        "date": date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "count": arguments.count,
        "seed": arguments.seed,
        "verdicts": dict(sorted(counts.items())),
        "examples": {kind: rows for kind, rows in sorted(examples.items())},
    }
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")


def load_verl_rules(folder: Path) -> Callable[..., Any]:
    """Import ``default_compute_score`` of a checkout without running ``verl/__init__.py``."""
    for name in ("verl", "verl.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("verl.utils.reward_score").default_compute_score


def _verdicts(response: Response, verl: Callable[..., Any]) -> str:
    rule = find_rule(response.data_source)
    assert rule is not None, "the generator draws sources that have rules"
    ours = rule(
        response.data_source, response.text, ground_truth=response.ground_truth, extra_info={}
    )
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = verl(response.data_source, response.text, response.ground_truth)
    score = theirs["score"] if isinstance(theirs, dict) else theirs
    return (
        f"{response.data_source}: verl {_word(score > RIGHT_SCORE)}, "
        f"tandem {_word(ours['acc'] > RIGHT_SCORE)}, person {_word(response.is_right)}"
    )


def _word(is_right: bool) -> str:
    return "right" if is_right else "wrong"


if __name__ == "__main__":
    main()
