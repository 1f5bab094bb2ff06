# SPDX-License-Identifier: Apache-2.0
"""A generator of answers as models write them, with what a person would say of each.

The judgement is known because the string is made from a value: a right one spells the value of the
ground truth, a wrong one spells another value, leaves it to be calculated, or hedges.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

UNITS = (
    "cm",
    "dollars",
    "degrees",
    "students",
    "hours",
    "units",
    "km",
    "points",
    "minutes",
    "feet",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A spelled answer: its form, the ground truth, and whether a person would accept it."""

    form: str
    content: str
    ground_truth: str
    is_right: bool


@dataclass(frozen=True, slots=True)
class Response:
    """A response of a model to a row of ``data_source``."""

    data_source: str
    form: str
    text: str
    ground_truth: str
    is_right: bool


def draw_responses(seed: int, count: int) -> Iterator[Response]:
    """Yield ``count`` responses for the sources of MATH, DAPO and Numina in turn."""
    draw = random.Random(seed)
    for number in range(count):
        answer = draw.choice(KINDS)(draw)
        data_source, frames = SOURCES[number % len(SOURCES)]
        name = draw.choice(tuple(frames))
        text = frames[name].replace("@", answer.content)
        if not _survives(name, answer.content):
            name, text = "box", f"So it is $\\boxed{{{answer.content}}}$."
        yield Response(
            data_source, f"{answer.form} in {name}", text, answer.ground_truth, answer.is_right
        )


def _survives(frame: str, content: str) -> bool:
    """Return whether a frame keeps the content whole: prose cuts at words, ``$`` at ``$``."""
    if frame in ("open box", "sum up"):
        return not any(sign in content for sign in " $=*")
    return "box" in frame or not any(sign in content for sign in ("=", ". ", "$", "*", " or "))


BOXES = {
    "box": r"We find that $\boxed{@}$.",
    "display": "Hence\n\\[\n\\boxed{@}\n\\]",
    "two boxes": r"First $\boxed{987654}$, then \boxed{@}",
    "spaced box": r"Therefore \boxed{ @ }. Done.",
    "fbox": r"Therefore \fbox{@}.",
    "bold box": r"**\boxed{@}**",
}
LINES = {
    "line": "Thus.\n\nAnswer: @",
    "formula": "Thus.\n\nAnswer: $@$",
    "bold line": "**Answer: $@$**",
    "bold word": "**Answer:** @",
    "boxed line": r"Answer: \boxed{@}",
    "full stop": "Answer: $@$.",
    "parentheses": r"Answer: \(@\)",
    "two lines": "Answer: 987654\nNo.\nAnswer: @",
    "answer below": "Answer:\n$@$",
    "lone box": r"Adding up gives \boxed{@}",
    "final": "**Final Answer: @**",
}
PROSE = {
    "is": "We add up. The answer is @.",
    "formula": "The answer is $@$.",
    "is the answer": "We add up. So $@$ is the answer.",
    "bold": "Therefore, the answer is **@**.",
    "colon": "Answer: @",
}
SOURCES = (
    ("lighteval/MATH", {**BOXES, "open box": r"Thus $\boxed @$"}),
    ("math_dapo", LINES),
    ("numina_olympiads", {**BOXES, **PROSE}),
)


def _integer(draw: random.Random) -> Answer:
    value = draw.choice((draw.randint(-50, 50), draw.randint(0, 999), draw.randint(1000, 10**7)))
    shown = _shift(draw, value)
    is_right = shown == value
    form = draw.choice(tuple(INTEGERS))
    return Answer(f"integer {form}", INTEGERS[form](draw, shown), str(value), is_right)


def _restated(draw: random.Random) -> Answer:
    value, part = draw.randint(20, 900), draw.randint(2, 9)
    form = draw.choice(tuple(RESTATED))
    return Answer(f"restated {form}", RESTATED[form](value, part), str(value), False)


def _fraction(draw: random.Random) -> Answer:
    value = Fraction(draw.randint(1, 9), draw.choice((3, 7, 11, 13, 17))) * draw.choice((1, -1))
    if value.denominator == 1:
        value += Fraction(1, 3)
    shown = value if draw.random() < 0.6 else value + Fraction(draw.randint(1, 5), 19)
    truth = draw.choice(tuple(FRACTIONS.values()))(abs(value))
    form = draw.choice(tuple(FRACTIONS))
    sign, truth_sign = ("-" if v < 0 else "" for v in (shown, value))
    content = sign + FRACTIONS[form](abs(shown))
    return Answer(f"fraction {form}", content, truth_sign + truth, shown == value)


def _decimal(draw: random.Random) -> Answer:
    value = Fraction(draw.choice((1, 3, 5, 7, 9, 11, 13)), draw.choice((2, 4, 8, 20)))
    shown = value if draw.random() < 0.6 else value + Fraction(draw.randint(1, 7), 8)
    decimal, fraction = str(float(shown)), FRACTIONS["frac"](shown)
    content = draw.choice((decimal, fraction, decimal.removeprefix("0"), f"{decimal}0"))
    truth = draw.choice((str(float(value)), FRACTIONS["frac"](value)))
    return Answer("decimal", content, truth, shown == value)


def _percent(draw: random.Random) -> Answer:
    value = draw.randint(2, 99)
    shown = _shift(draw, value)
    content = draw.choice((f"{shown}\\%", f"{shown}%", f"{shown}", f"{shown} percent"))
    truth = draw.choice((f"{value}\\%", f"{value}", f"{value}%"))
    return Answer("percent", content, truth, shown == value)


def _surd(draw: random.Random) -> Answer:
    factor, root = draw.randint(2, 9), draw.choice((2, 3, 5, 7))
    other = _shift(draw, factor)
    forms = (
        f"{other}\\sqrt{{{root}}}",
        f"{other}\\sqrt{root}",
        f"{other} \\sqrt{{{root}}}",
        f"{other} \\cdot \\sqrt{{{root}}}",
        f"\\sqrt{{{other * other * root}}}",
    )
    content = draw.choice(forms if other > 0 else forms[:3])
    return Answer("surd", content, f"{factor}\\sqrt{{{root}}}", other == factor)


def _collected(draw: random.Random) -> Answer:
    first, second, root = draw.randint(2, 9), draw.randint(2, 9), draw.choice((2, 3, 5, 7))
    content = f"{first}\\sqrt{{{root}}}+{second}\\sqrt{{{root}}}"
    return Answer("like terms", content, f"{first + second}\\sqrt{{{root}}}", False)


def _multiple_of_pi(draw: random.Random) -> Answer:
    value, below = draw.randint(2, 30), draw.choice((1, 31))
    shown = _shift(draw, value)
    pattern = "@\\pi" if below == 1 else "\\frac{@\\pi}{31}"
    unit = draw.choice(("", "\\text{ cm}^2", "\\text{ units}"))
    content, truth = (pattern.replace("@", str(number)) for number in (shown, value))
    is_whole = below > 1 and shown % below == 0
    return Answer("multiple of pi", content + unit, truth, shown == value and not is_whole)


def _polynomial(draw: random.Random) -> Answer:
    a, b = draw.sample(range(2, 9), 2)
    c = _shift(draw, b)
    truth = f"x^2+{a + b}x+{a * b}"
    content = draw.choice(
        (
            f"x^2+{a + c}x+{a * c}",
            f"{a * c} + {a + c}x + x^2",
            f"(x+{a})(x+{c})",
            f"(x + {c})(x + {a})",
        )
        if c > 0
        else (f"x^2+{a + c + 40}x+{a * c}",)
    )
    return Answer("polynomial", content, truth, c == b)


def _list(draw: random.Random) -> Answer:
    first, second = draw.sample(range(1, 90), 2)
    opening, closing = draw.choice((("", ""), ("(", ")"), ("\\{", "\\}"), ("[", "]")))
    is_swapped, is_wrong = draw.random() < 0.3, draw.random() < 0.3
    third = second + 100 if is_wrong else second
    shown = (third, first) if is_swapped else (first, third)
    separator = draw.choice((",", ", ", ",\\ "))
    content = f"{opening}{shown[0]}{separator}{shown[1]}{closing}"
    is_right = not is_wrong and (not is_swapped or opening == "\\{")
    return Answer("list", content, f"{opening}{first},{second}{closing}", is_right)


def _interval(draw: random.Random) -> Answer:
    low, high = sorted(draw.sample(range(-40, 40), 2))
    ends = ("()", "[]", "[)", "(]")
    truth, shown = draw.choice(ends), draw.choice(ends)
    if draw.random() < 0.5:
        shown = truth
    space = draw.choice(("", " "))
    left, right = draw.choice((("", ""), ("\\left", "\\right")))
    content = f"{left}{shown[0]}{low},{space}{high}{right}{shown[1]}"
    return Answer("interval", content, f"{truth[0]}{low},{high}{truth[1]}", shown == truth)


def _choice(draw: random.Random) -> Answer:
    truth, shown = draw.choice("ABCDE"), draw.choice("ABCDE")
    form = draw.choice(("@", "(@)", "\\text{@}", "\\text{(@)}", "\\textbf{@}", "\\mathrm{@}"))
    return Answer("choice", form.replace("@", shown), truth, shown == truth)


def _hedge(draw: random.Random) -> Answer:
    value = draw.randint(10, 900)
    form = draw.choice(("@ \\text{ or } #", "@ or #", "@, #", "@ \\text{ and } #", "\\{@, #\\}"))
    content = form.replace("@", str(value)).replace("#", str(value + 1))
    return Answer("hedge", content, str(value), False)


def _shift(draw: random.Random, value: int) -> int:
    """Return ``value``, or in two cases of five another one that is no power of ten of it."""
    return value if draw.random() < 0.6 else value + draw.choice((-1, 1, 2, 7))


def _grouped(value: int, separator: str) -> str:
    return f"{value:,}".replace(",", separator)


def _worded(draw: random.Random, pattern: str, value: int) -> str:
    return pattern.replace("@", str(value)).replace("#", draw.choice(UNITS))


INTEGERS: dict[str, Callable[[random.Random, int], str]] = {
    "plain": lambda draw, n: str(n),
    "commas": lambda draw, n: _grouped(n, ","),
    "braced commas": lambda draw, n: _grouped(n, "{,}"),
    "thin spaces": lambda draw, n: _grouped(n, "\\,"),
    "negative thin spaces": lambda draw, n: _grouped(n, ",\\!"),
    "decimal": lambda draw, n: f"{n}.0",
    "name": lambda draw, n: f"x = {n}",
    "text unit": lambda draw, n: _worded(draw, "@\\text{ #}", n),
    "spaced text unit": lambda draw, n: _worded(draw, "@ \\text{#}", n),
    "unit": lambda draw, n: _worded(draw, "@ #", n),
    "square unit": lambda draw, n: f"{n}\\text{{ cm}}^2",
    "roman unit": lambda draw, n: f"{n}\\,\\mathrm{{km}}",
    "dollars": lambda draw, n: f"\\${n}",
    "degrees": lambda draw, n: f"{n}^\\circ",
    "braced degrees": lambda draw, n: f"{n}^{{\\circ}}",
    "text": lambda draw, n: f"\\text{{{n}}}",
    "bold": lambda draw, n: f"\\textbf{{{n}}}",
    "bold digits": lambda draw, n: f"\\mathbf{{{n}}}",
    "stars": lambda draw, n: f"**{n}**",
    "full stop": lambda draw, n: f"{n}.",
    "chain": lambda draw, n: f"{n - 5} + 5 = {n}",
}
RESTATED: dict[str, Callable[[int, int], str]] = {
    "sum": lambda n, k: f"{n - k}+{k}",
    "spaced sum": lambda n, k: f"{n - k} + {k}",
    "difference": lambda n, k: f"{n + k}-{k}",
    "slash": lambda n, k: f"{n * k}/{k}",
    "fraction": lambda n, k: f"\\frac{{{n * k}}}{{{k}}}",
    "root": lambda n, k: f"\\sqrt{{{n * n}}}",
    "binomial": lambda n, k: f"\\binom{{{n}}}{{1}}",
    "product": lambda n, k: f"1 \\cdot {n}",
    "times": lambda n, k: f"{n} \\times 1",
    "power": lambda n, k: f"{n}^1",
    "absolute value": lambda n, k: f"|-{n}|",
    "symbol": lambda n, k: f"{n}+x-x",
    "gcd": lambda n, k: f"\\gcd({n}, {n * k})",
    "factorial": lambda n, k: f"{n}\\cdot 1!",
}
FRACTIONS: dict[str, Callable[[Fraction], str]] = {
    "frac": lambda q: f"\\frac{{{q.numerator}}}{{{q.denominator}}}",
    "dfrac": lambda q: f"\\dfrac{{{q.numerator}}}{{{q.denominator}}}",
    "tfrac": lambda q: f"\\tfrac{{{q.numerator}}}{{{q.denominator}}}",
    "slash": lambda q: f"{q.numerator}/{q.denominator}",
    "spaced": lambda q: f"\\frac {{{q.numerator}}} {{{q.denominator}}}",
    "doubled": lambda q: f"\\frac{{{2 * q.numerator}}}{{{2 * q.denominator}}}",
}
KINDS = (
    _integer,
    _integer,
    _integer,
    _restated,
    _fraction,
    _decimal,
    _percent,
    _surd,
    _collected,
    _multiple_of_pi,
    _polynomial,
    _list,
    _interval,
    _choice,
    _hedge,
)
