# SPDX-License-Identifier: Apache-2.0
"""Expressions that are no plain numbers, compared by math-verify, and how simple they are.

An answer must be finished, because it could otherwise restate the question: it leaves no arithmetic
to carry out (two numbers to add, multiply or divide, a number to a whole power, a fraction to
reduce, a factorial, a sum, a whole root), no like terms and no factor 0. An answer that is not
finished counts if it has no more operations than the ground truth.

math-verify is imported on first use, which takes half a second. Its time limits are switched off,
because the pool enforces the deadline.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

_TO_CARRY_OUT = re.compile(
    r"!|\\(?:binom|dbinom|tbinom|choose|sum|prod|int|lim|gcd|lcm|max|min|det|lfloor|lceil|bmod|pmod"
    r"|mod|div)(?![A-Za-z])"
)
_QUOTIENT = re.compile(r"\\frac\{(\d{1,400})\}\{(\d{1,400})\}|(?<![\w.}])(\d{1,400})/(\d{1,400})")
_OPERATION = re.compile(
    r"(?<=[\w)}])(?=\()|(?<=[\d)}])(?=[A-Za-z\\])(?!\\(?:times|cdot|div|le|ge|[}]))"
    r"|(?<=[^-+*/^=(\[{,<>])[-+]|[*/^!]|\\(?!left|right|pi|infty|\{|\}|[%,;: ])[A-Za-z]+"
)
_MAX_DEGREE = 1000
_MAX_RADICAND = 10**12


def is_equal_expression(answer: str, ground_truth: str) -> bool:
    """Return whether ``answer`` equals ``ground_truth`` and is as simple as an answer has to be.

    Both are plain texts (``math_text.plain``).

    Raises:
        ValueError: the ground truth is not a mathematical expression.
    """
    wanted = _read(ground_truth)
    if not wanted:
        raise ValueError(f"ground truth {ground_truth!r} is not a mathematical expression")
    given = _read(answer)
    if not given or not (_is_finished(answer, given) or _is_shorter(answer, ground_truth)):
        return False
    _, verify, _ = _math_verify()
    return verify(wanted, given, timeout_seconds=0)


def num_operations(text: str) -> int:
    r"""Count the operations that a plain text shows: ``2\sqrt{2}`` has two."""
    return len(_OPERATION.findall(re.sub(r"\s", "", text)))


def _is_shorter(answer: str, ground_truth: str) -> bool:
    return num_operations(answer) <= num_operations(ground_truth)


def _is_finished(text: str, given: Iterable[Any]) -> bool:
    squeezed = re.sub(r"\s", "", text)
    if _TO_CARRY_OUT.search(squeezed) or any(map(_can_reduce, _QUOTIENT.finditer(squeezed))):
        return False
    return all(not _can_evaluate(part) for part in given if not isinstance(part, str))


def _can_reduce(quotient: re.Match[str]) -> bool:
    above, below = (int(digits) for digits in quotient.groups() if digits is not None)
    return below < 2 or math.gcd(above, below) > 1


def _can_evaluate(expression: Any) -> bool:
    """Return whether sympy's tree of the text, which is not evaluated, has something to do."""
    arguments = getattr(expression, "args", ())
    if _is_open(expression):
        return True
    return any(_can_evaluate(argument) for argument in arguments)


def _is_open(node: Any) -> bool:
    if getattr(node, "is_Add", False):
        terms = [term for part in node.args for term in _flat(part, "is_Add")]
        keys = [str(_without_coefficient(term)) for term in terms]
        return len(set(keys)) < len(keys)
    if getattr(node, "is_Mul", False):
        return _is_open_product([factor for part in node.args for factor in _flat(part, "is_Mul")])
    if getattr(node, "is_Pow", False):
        return _is_open_power(*node.args)
    name = type(node).__name__
    return name == "Abs" and bool(node.args[0].is_number)


def _flat(node: Any, kind: str) -> list[Any]:
    if not getattr(node, kind, False):
        return [node]
    return [part for argument in node.args for part in _flat(argument, kind)]


def _without_coefficient(term: Any) -> Any:
    factors = _flat(term, "is_Mul")
    kept = [str(_without_square(factor)) for factor in factors if not _is_plain(factor)]
    return "*".join(sorted(kept)) or "1"


def _without_square(factor: Any) -> Any:
    """Return the root that is left of a root of a whole number: that of 2 for that of 50."""
    is_root = factor.is_Pow and factor.args[0].is_Integer and factor.args[1].is_Rational
    if not is_root or factor.args[1].is_Integer or abs(factor.args[0]) > _MAX_RADICAND:
        return factor
    return factor.func(*factor.args).as_coeff_Mul()[1]


def _is_open_product(factors: list[Any]) -> bool:
    above = [factor for factor in factors if factor.is_Number and factor not in (1, -1)]
    below = [factor for factor in factors if _is_reciprocal(factor)]
    roots = [factor for factor in factors if factor.is_Pow and factor.args[0].is_Number]
    surds = [root for root in roots if root.args[1].is_Rational and not root.args[1].is_Integer]
    if len(above) > 1 or len(below) > 1 or len(surds) > 1 or any(n == 0 for n in above):
        return True
    whole = [n for n in above if n.is_Integer]
    return bool(whole and below) and math.gcd(int(whole[0]), int(below[0].args[0])) > 1


def _is_reciprocal(node: Any) -> bool:
    return bool(node.is_Pow and node.args[0].is_Integer and node.args[1] == -1)


def _is_plain(node: Any) -> bool:
    return bool(node.is_Number or _is_reciprocal(node))


def _is_open_power(base: Any, exponent: Any) -> bool:
    if not base.is_number:
        return exponent in (0, 1)
    if exponent.is_Integer:
        return exponent != -1 or not (base.is_Integer or base.is_Pow)
    if base.is_Integer and exponent.is_Rational and exponent.p == 1 and exponent.q <= _MAX_DEGREE:
        return _is_whole_root(abs(int(base)), int(exponent.q))
    return False


def _is_whole_root(number: int, degree: int) -> bool:
    nearest = round(number ** (1 / degree)) if number < 2**900 else math.isqrt(number)
    return any(max(root, 0) ** degree == number for root in (nearest - 1, nearest, nearest + 1))


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> list[Any]:
    """Return the expression and its text, or nothing; samples of a prompt share their truth."""
    parse, _, how = _math_verify()
    return parse(f"\\boxed{{{text}}}", [how], parsing_timeout=0)


@functools.cache
def _math_verify() -> tuple[Callable[..., list[Any]], Callable[..., bool], Any]:
    from math_verify import LatexExtractionConfig, parse, verify

    # Without time limits it warns that the caller must enforce them, as the pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify, LatexExtractionConfig()
