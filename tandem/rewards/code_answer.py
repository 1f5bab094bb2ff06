# SPDX-License-Identifier: Apache-2.0
"""The rule of programming tasks (codecontests, apps, codeforces, taco): a program and its tests.

The ground truth is ``{"inputs": [...], "outputs": [...]}``, as a mapping or as JSON: texts for
stdin and stdout, or with ``fn_name`` the arguments and results of that function. ``code_program``
runs the program; outputs are compared here, where it cannot reach them. A program that is wrong,
slow, too large or ended fails its test. If the tests themselves cannot be read or run, the rule
raises, and the sample has no score.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tandem.rewards.code_runner import run_job

NUM_SCORED_TESTS = 10
"""The tests that give a share of the score (verl's number)."""
_MAX_TESTS_AT_ONCE = 40
_GRACE_S = 8.0
_MIN_OUTPUT_BYTES = 1 << 16
_OUTPUT_FACTOR = 4
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cases:
    """The tests of a task: parsed arguments and results if ``fn_name`` is set, else texts."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    fn_name: str | None


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The limits of a program: for each test, and ``budget_s`` for all of its tests together.

    Tests that the budget leaves out are not passed. It is less than the default time limit of a
    reward, so that a slow program is a wrong answer, not a failure of the reward.
    """

    cpu_s: int = 5
    wall_s: float = 10.0
    budget_s: float = 20.0
    memory_mb: int = 512


def compute_score(
    data_source: str,
    solution_str: str,
    *,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    continuous: bool = True,
) -> Mapping[str, Any]:
    """Score 1 if the program in the last code block passes all tests.

    Otherwise the score is 0, or with ``continuous`` the share of the first ten tests that it
    passes; a program that passes those and fails a later one gets the share of all. ``acc`` is 1
    or 0.

    Raises:
        ValueError: the ground truth has no readable tests.
        RuntimeError: the tests could not be run.
    """
    tests = read_tests(ground_truth)
    source = last_program(solution_str)
    passed = count_passed(source, tests, limits=ProgramLimits())
    is_right = passed == len(tests.inputs)
    share = passed / min(NUM_SCORED_TESTS, len(tests.inputs))
    if share >= 1.0:
        share = passed / len(tests.inputs)
    score = float(is_right) if is_right or not continuous else share
    return {"score": score, "acc": float(is_right)}


def last_program(text: str) -> str:
    """Return the last code block, or the whole text if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def read_tests(ground_truth: Any) -> Cases:
    """Return the tests of a ground truth.

    Raises:
        ValueError: it is neither JSON nor a mapping, or lacks matching inputs and outputs.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping) or not {"inputs", "outputs"} <= set(tests):
        raise ValueError("the ground truth has no inputs and outputs")
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    name = tests.get("fn_name")
    if name is None:
        return Cases(list(map(_lines, inputs)), list(map(_lines, outputs)), None)
    arguments = [_parsed_lines(entry) if isinstance(entry, str) else entry for entry in inputs]
    results = [json.loads(entry) if isinstance(entry, str) else entry for entry in outputs]
    return Cases(arguments, results, name)


def count_passed(source: str, tests: Cases, *, limits: ProgramLimits) -> int:
    """Run the first tests, and the others up to the first failure; return how many pass.

    Raises:
        RuntimeError: the tests could not be run.
    """
    passed, start, size = 0, 0, NUM_SCORED_TESTS
    give_up_at_s = time.monotonic() + limits.budget_s
    while start < len(tests.inputs):
        stop = start + size
        part = Cases(tests.inputs[start:stop], tests.outputs[start:stop], tests.fn_name)
        left_s = max(0.0, give_up_at_s - time.monotonic())
        verdicts = _run(source, part, limits=replace(limits, budget_s=left_s))
        passed += sum(verdicts)
        if not all(verdicts):
            break
        start, size = stop, _MAX_TESTS_AT_ONCE
    return passed


def is_right_output(output: str, expected: str) -> bool:
    """Return whether two texts are equal word by word, with rounded decimals for decimals.

    Spaces inside a line, trailing spaces and empty lines do not count.
    """
    given, wanted = _words(output), _words(expected)
    if given == wanted:
        return True
    if [len(line) for line in given] != [len(line) for line in wanted]:
        return False
    pairs = zip(sum(given, []), sum(wanted, []), strict=True)
    return all(one == other or _is_near(one, other) for one, other in pairs)


def is_right_result(result: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal, decimals up to rounding.

    A list of one value may stand for the value, as in the data of APPS.
    """
    if _is_same(result, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _is_same(result, expected[0])


def _run(source: str, tests: Cases, *, limits: ProgramLimits) -> list[bool]:
    longest = max(len(json.dumps(output)) for output in tests.outputs)
    job = {
        "source": source,
        "inputs": tests.inputs,
        "fn_name": tests.fn_name,
        "output_bytes": max(_MIN_OUTPUT_BYTES, _OUTPUT_FACTOR * longest),
        **asdict(limits),
    }
    answers = run_job(job, timeout_s=limits.budget_s + _GRACE_S)
    pairs = zip(answers, tests.outputs, strict=True)
    return [
        answer["end"] == "done" and _is_right(answer["output"], expected, fn_name=tests.fn_name)
        for answer, expected in pairs
    ]


def _is_right(output: str, expected: Any, *, fn_name: str | None) -> bool:
    if fn_name is None:
        return is_right_output(output, expected)
    try:
        return is_right_result(json.loads(output), expected)
    except (ValueError, RecursionError):
        return False


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _parsed_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def _is_near(given: str, expected: str) -> bool:
    """Compare two numbers, if the expected one has a point or an exponent."""
    if expected.lstrip("-").isdigit():
        return False
    try:
        return _is_close(float(given), float(expected))
    except ValueError:
        return False


def _is_close(given: float, expected: float) -> bool:
    return math.isclose(given, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _is_same(result: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(result, list)
            and len(result) == len(expected)
            and all(map(_is_same, result, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(result, dict)
            and result.keys() == expected.keys()
            and all(_is_same(result[key], value) for key, value in expected.items())
        )
    if isinstance(expected, bool) or isinstance(result, bool):
        return result is expected
    if isinstance(expected, float) and isinstance(result, int | float):
        return _is_close(result, expected)
    return result == expected
