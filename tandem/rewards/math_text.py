# SPDX-License-Identifier: Apache-2.0
"""Texts of mathematical answers: where an answer stands in a response, and its plain spelling.

``plain`` removes what has no meaning (markdown, delimiters of formulas, spacing, sizes of brackets)
and gives each construct one spelling. It computes nothing.
"""

from __future__ import annotations

import re

_TAIL_CHARACTERS = 300
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(\{)|\s+(?=[^\s{$]))")
_ANSWER_LINE = re.compile(r"answer\W{0,2}:\s*([^\n]+)", re.IGNORECASE)
_ANSWER_BEFORE = re.compile(r"\bis (?:the|our|my) (?:final )?answer\b", re.IGNORECASE)
_MARK = re.compile(r"\banswers? ?(?:is|are)\b:?|\banswers?\W{0,2}:", re.IGNORECASE)
_STATED = re.compile(
    r".*(?:\b(?:is|are|be|get|equals)\b:?|=|:(?=\s))\s*(\S.*)",
    re.IGNORECASE | re.DOTALL,
)
_CONNECTIVES = re.compile(r"^(?:(?:so|thus|hence|therefore|then|and)\b,? *)+", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<!\\)[.!](?:\s|$)")
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$((?:\\.|[^$\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u00b0": "^\\circ ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u222a": "\\cup ",
        "\u00a0": " ",
        "\u202f": " ",
        "\uff0c": ",",
        "~": " ",
    }
)
_WORDS = r"text|textrm|textup|textnormal|mbox|mathrm|rm"
_FONTS = r"textbf|textit|mathbf|mathit|mathsf|boldsymbol|bm|emph|displaystyle|textstyle"
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\*\*(.+?)\*\*", r" \1 "),
        (r"\\\$|[\u20ac\u00a3]", " "),
        (r"(?<!\\)\\[()\[\]](?![A-Za-z])|\$", " "),
        (r"(?<=\d)(?:\\,|\\!|\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ","),
        (r"\\!|\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![A-Za-z])\.?", ""),
        (r"(?<!\\)\\[,;: ]|\\(?:quad|qquad|thinspace)(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (rf"\\(?:{_FONTS})(?![A-Za-z])", ""),
        (r"\\%", "%"),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", " degrees "),
        (r"\\(?:le|ge)q?(?![A-Za-z])", lambda found: found[0][:3] + " "),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (r"\\frac\s+\{", r"\\frac{"),
        (r"\}\s+\{", "}{"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"\^\s*\{(\w)\}", r"^\1"),
        (r"\s+", " "),
    )
)
_WRAPPER = re.compile(rf"\\(?:{_WORDS}|{_FONTS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_TRAILING_UNIT = re.compile(
    rf"(?<=\S)\s*\\(?:{_WORDS})\s*\{{[^{{}}\d]*\}}(?:\^\{{?\d\}}?)?[\s.$*]*$"
)
_TRAILING_WORDS = re.compile(r"(?<=[\d)\]}]) [a-z]{3,}(?: [a-z]{3,})*[\s.$*]*$")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last box, or None if it is missing or not closed.

    ``\boxed{34}``, ``\fbox{34}`` and ``\boxed 34`` are boxes.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if boxes[-1][1]:
        return closed_braces(text, start - 1)
    is_in_formula = 1 in (text[:start].count("$") % 2, text.count("$", start) % 2)
    end = text.find("$", start) if is_in_formula else -1
    return text[start:end] if end > 0 else text[start:].split(maxsplit=1)[0].rstrip(".,;:")


def closed_braces(text: str, start: int) -> str | None:
    """Return what stands between the brace at ``start`` and its partner; None without partner."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position]
    return None


def last_answer_line(text: str) -> str | None:
    """Return the answer after the last ``Answer:`` in the last 300 characters.

    It is the content of a box, else the formula of the line, else the whole line.
    """
    lines = _ANSWER_LINE.findall(text[-_TAIL_CHARACTERS:])
    return _answer_of(lines[-1]) if lines else None


def boxed_at_the_end(text: str) -> str | None:
    """Return the content of the last box in the last 300 characters."""
    return last_boxed(text[-_TAIL_CHARACTERS:])


def stated_answer(text: str) -> str | None:
    """Return the last box; without one, the answer that the last sentence of ``text`` states.

    ``The answer is 34.``, ``So x = 34`` and ``34 is the answer.`` state 34, as 34 alone does.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    tail = text[-_TAIL_CHARACTERS:].strip()
    before = list(_ANSWER_BEFORE.finditer(tail))
    if before:
        sentence = _SENTENCE_END.split(tail[: before[-1].start()].strip(" ."))[-1]
        answer = _answer_of(sentence)
        return _CONNECTIVES.sub("", answer)
    marked = [found.end() for found in _MARK.finditer(tail)]
    if marked:
        line = tail[marked[-1] :].strip().split("\n")[0]
        return _answer_of(_SENTENCE_END.split(line)[0]) if line else None
    sentences = [part.strip() for part in _SENTENCE_END.split(tail) if part.strip()]
    stated = [found[1] for found in map(_STATED.fullmatch, sentences) if found]
    return _answer_of((stated or sentences)[-1]) if sentences else None


def plain(text: str) -> str:
    """Return ``text`` in one spelling, with words in place of commands for text."""
    text = text.strip().translate(_CHARACTERS)
    nested = last_boxed(text) if re.match(r"\W*\\(?:boxed|fbox)", text) else None
    if nested is not None:
        text = nested
    while _WRAPPER.search(text):
        text = _WRAPPER.sub(r" \1 ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _without_punctuation(text)


def split_unit(text: str) -> tuple[str, str]:
    r"""Split off a unit at the end, as in ``9\pi \text{ cm}^2`` and ``(n+1) ways``."""
    text = text.strip().strip("*").strip()
    found = _TRAILING_UNIT.search(text) or _TRAILING_WORDS.search(text)
    if found is None:
        return text, ""
    value = text[: found.start()].rstrip()
    is_unit = re.search(r"[\w\\]", value) and not value.endswith("=")
    return (value, found[0]) if is_unit else (text, "")


def squeeze(text: str) -> str:
    """Return a plain text without spaces."""
    return re.sub(r"\s", "", text)


def split_outside(text: str, separator: str) -> list[str]:
    """Split a plain text at each ``separator`` that stands outside all brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position])
            start = position + len(separator)
    return [part.strip() for part in (*parts, text[start:])]


def _answer_of(line: str) -> str:
    """Return the content of the box in a line, else its formula, else the line."""
    boxed = last_boxed(line)
    if boxed is not None:
        return boxed
    formulas = list(_MATH.finditer(line))
    if not formulas:
        return line.strip()
    outside = line[: formulas[0].start()] + line[formulas[-1].end() :]
    if len(formulas) > 1 and not re.search(r"[A-Za-z]{3}", _between(line, formulas)):
        return line.strip()
    if re.search(r"[\d\\]", outside):
        return line.strip()
    return next(part for part in formulas[0].groups() if part is not None)


def _between(line: str, formulas: list[re.Match[str]]) -> str:
    pairs = zip(formulas, formulas[1:], strict=False)
    return " ".join(line[left.end() : right.start()] for left, right in pairs)


def _without_punctuation(text: str) -> str:
    """Remove punctuation at the ends, and brackets of which the whole text is the content."""
    text = text.strip().strip("*").strip().rstrip(".,;:").strip()
    if text.startswith("{") and closed_braces(text, 0) == text[1:-1]:
        return _without_punctuation(text[1:-1])
    return text
