# SPDX-License-Identifier: Apache-2.0
"""Numbers as people write them, with their exact values.

A number is an integer, a decimal, a fraction of integers, a mixed number, or one of them times a
power of ten; with a sign, separators of thousands, a per cent sign, or a unit behind it. Anything
else (``17+17``, ``7!``, ``2^5``) is arithmetic that is still to be carried out, and no number.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

_RELATIVE_ROUNDING = Fraction(1, 10_000)
_MIN_ROUNDED_DECIMALS = 2
_MAX_UNIT_WORDS = 4

_SIGN = re.compile(r"([-+]?) ?")
_MIXED = re.compile(r"(\d+) ?\\frac\{ ?(\d+) ?\}\{ ?(\d+) ?\}|(\d+) (\d+) ?/ ?(\d+)")
_FRACTION = re.compile(r"\\frac\{ ?(-?\d+) ?\}\{ ?(\d+) ?\}|(\d+) ?/ ?(\d+)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_POWER_OF_TEN = re.compile(r"10 ?\^(?:(\d)|\{ ?(-?\d{1,3}) ?\})")
_DECIMAL = re.compile(r"\d{1,3}(?:, ?\d{3})+(?!\d)(?:\.\d+)?|\d{1,400}(?:\.\d*)?|\.\d+")
_EXPONENT = re.compile(r"[eE]([-+]?\d{1,3})(?!\w)")
_TIMES_POWER = re.compile(rf" ?(?:\\times|\\cdot|\*|x) ?{_POWER_OF_TEN.pattern}")

_PERCENT = re.compile(r" ?(?:%|per ?cent\b)", re.IGNORECASE)
_SCALE = re.compile(r" (hundred|thousand|million|billion|trillion|dozen)\b", re.IGNORECASE)
_SCALES = {
    "hundred": 100,
    "dozen": 12,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_BASE = re.compile(r"_(?:(\d)|\{ ?(\d+) ?\})")
_ORDINAL = re.compile(r" ?\^?\{? ?(?:st|nd|rd|th) ?\}?")
_UNIT = re.compile(
    r" ?(?:per |/ ?)?[A-Za-z]+(?:[ -]?\^ ?(?:\d|\{\d\})|[ -]?/[ -]?|[ -][A-Za-z]+)*[A-Za-z]*"
)
_SHORT_UNITS = re.compile(
    r"[cmdk]?m|in|ft|yd|mi|[mk]?g|lb|oz|t|m?s|min|h|hr|[md]?l|am|pm|mph|v|k?w|n|j|k|c|f|a|hz|rad"
    r"|sq|cu"
)
_APART = re.compile("[acfjkntvw]")
"""The short units that are read as units only behind a space."""
_NO_UNITS = re.compile(
    "or|and|not|no|to|if|isn?|are|than|more|less|least|most|minus|plus|times|over|squared|cubed"
    "|factorial|choose|half|root|sqrt|sin|cos|tan|log|ln|mod|div|about|up|down|below|above"
)
_ALIASES = {
    "centimeter": "cm",
    "centimetre": "cm",
    "millimeter": "mm",
    "meter": "m",
    "metre": "m",
    "kilometer": "km",
    "kilometre": "km",
    "gram": "g",
    "kilogram": "kg",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "foot": "ft",
    "feet": "ft",
    "inch": "in",
    "inche": "in",
    "square": "sq",
    "cubic": "cu",
    "liter": "l",
    "litre": "l",
    "unit": "",
}


@dataclass(frozen=True, slots=True)
class Number:
    """The value of a written number, and how it is written.

    Attributes:
        value: the exact value of the digits; 50 for ``50%``.
        is_fraction: it is written with a fraction bar.
        is_reduced: no division is left to do; false for ``68/2``.
        is_percent: a per cent sign follows.
        decimals: the digits behind the point, 0 for whole numbers; None for fractions.
        unit: the unit in one spelling, or the base as ``base 2``; empty without a unit.
    """

    value: Fraction
    is_fraction: bool = False
    is_reduced: bool = True
    is_percent: bool = False
    decimals: int | None = None
    unit: str = ""


def read_number(text: str) -> Number | None:
    """Return the number that a plain text (``math_text.plain``) is, or None if it is no number."""
    text = _inside_parentheses(text.strip())
    sign = _SIGN.match(text)
    assert sign is not None, "an empty sign matches everywhere"
    magnitude = _read_magnitude(text[sign.end() :])
    if magnitude is None:
        return None
    number, rest = magnitude
    power = _TIMES_POWER.match(rest) or _EXPONENT.match(rest)
    value = number.value
    if power is not None:
        value *= Fraction(10) ** int(next(group for group in power.groups() if group is not None))
        rest = rest[power.end() :]
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    scale = _SCALE.match(rest)
    if scale is not None:
        value *= _SCALES[scale[1].lower()]
        rest = rest[scale.end() :]
    unit = read_unit(rest)
    if unit is None:
        return None
    return Number(
        -value if sign[1] == "-" else value,
        is_fraction=number.is_fraction,
        is_reduced=number.is_reduced,
        is_percent=percent is not None,
        decimals=None if power or scale else number.decimals,
        unit=unit,
    )


def is_same_number(answer: Number, truth: Number) -> bool:
    """Return whether ``answer`` is the number ``truth``, and no harder to read.

    A fraction that can be reduced counts only for a fraction. ``50%`` is 50 and 0.5. A unit may be
    left out, but not be another one. A truth with two or more decimals is a rounded number: an
    answer that rounds to it and differs by at most 1 in 10,000 counts.
    """
    if not (answer.is_reduced or truth.is_fraction):
        return False
    if answer.unit and truth.unit and answer.unit != truth.unit:
        return False
    if any(_is_close(given, truth) for given in _values(answer)):
        return True
    return truth.is_percent and not answer.is_percent and answer.value == truth.value / 100


def _values(number: Number) -> tuple[Fraction, ...]:
    return (number.value, number.value / 100) if number.is_percent else (number.value,)


def _is_close(given: Fraction, truth: Number) -> bool:
    if given == truth.value:
        return True
    if not truth.decimals or truth.decimals < _MIN_ROUNDED_DECIMALS:
        return False
    is_near = abs(given - truth.value) <= _RELATIVE_ROUNDING * abs(truth.value)
    return is_near and round(given, truth.decimals) == truth.value


def _inside_parentheses(text: str) -> str:
    is_enclosed = text.startswith("(") and text.endswith(")") and text.count("(") == 1
    return text[1:-1].strip() if is_enclosed else text


def _read_magnitude(text: str) -> tuple[Number, str] | None:
    """Return the unsigned number at the start of ``text``, and the rest."""
    for pattern, read in _FORMS:
        found = pattern.match(text)
        if found is not None:
            try:
                number = read([group for group in found.groups() if group is not None])
            except ValueError:  # more digits than Python reads
                return None
            return None if number is None else (number, text[found.end() :])
    return None


def _mixed(digits: list[str]) -> Number | None:
    part = _fraction(digits[1:])
    if part is None:
        return None
    is_reduced = part.is_reduced and part.value < 1
    return Number(int(digits[0]) + part.value, is_fraction=True, is_reduced=is_reduced)


def _fraction(digits: list[str]) -> Number | None:
    above, below = map(int, digits)
    if below == 0:
        return None
    is_reduced = below > 1 and math.gcd(above, below) == 1
    return Number(Fraction(above, below), is_fraction=True, is_reduced=is_reduced)


def _repeating(digits: list[str]) -> Number:
    whole, behind, repeated = digits
    tail = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(behind))
    return Number(Fraction(f"{whole or 0}.{behind or 0}") + tail)


def _power(digits: list[str]) -> Number:
    return Number(Fraction(10) ** int(digits[0]))


def _decimal(digits: list[str]) -> Number:
    text = digits[0].replace(",", "").replace(" ", "")
    return Number(Fraction(text.rstrip(".")), decimals=len(text.partition(".")[2]))


_FORMS = (
    (_MIXED, _mixed),
    (_FRACTION, _fraction),
    (_REPEATING, _repeating),
    (_POWER_OF_TEN, _power),
    (re.compile(f"({_DECIMAL.pattern})"), _decimal),
)


def read_unit(rest: str) -> str | None:
    """Return the unit that a plain text is in one spelling, or None if it is something else."""
    if not rest.strip() or _ORDINAL.fullmatch(rest.rstrip()):
        return ""
    base = _BASE.fullmatch(rest.rstrip())
    if base is not None:
        return f"base {base[1] or base[2]}"
    if not _UNIT.fullmatch(rest.rstrip()):
        return None
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", rest)]
    if len(words) > _MAX_UNIT_WORDS or any(map(_NO_UNITS.fullmatch, words)):
        return None
    if any(len(word) < 3 and not _SHORT_UNITS.fullmatch(word) and word != "of" for word in words):
        return None
    is_known = _SHORT_UNITS.fullmatch(words[0]) and not _APART.fullmatch(words[0])
    if not (rest.startswith(" ") or is_known):
        return None
    spelled = re.sub(r"[A-Za-z]+", lambda found: _one_spelling(found[0].lower()), rest)
    return re.sub(r"[\s{}]", "", spelled)


def _one_spelling(word: str) -> str:
    for form in (word, word.removesuffix("s")):
        if form in _ALIASES:
            return _ALIASES[form]
    return word if _SHORT_UNITS.fullmatch(word) else word.removesuffix("s")
