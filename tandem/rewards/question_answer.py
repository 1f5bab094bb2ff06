# SPDX-License-Identifier: Apache-2.0
"""Questions with short answers (the sources of Search-R1): exact match of normalised text.

The answer is what the last ``<answer>...</answer>`` holds. Case, punctuation and the articles a, an
and the do not count. A right answer scores a quarter if the response has more than ten such tags.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from typing import Any

from tandem.rewards.gsm8k import NO_ANSWER

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MAX_TAGS = 10
_SHARE_OF_MANY = 0.25


def compute_score(
    data_source: str, solution_str: str, *, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Score 1 if the answer is one of ``ground_truth["target"]``, else 0.

    Raises:
        ValueError: the ground truth has no target.
    """
    targets = [normalize(target) for target in _targets(ground_truth)]
    answers = _ANSWER.findall(solution_str)
    answer = normalize(answers[-1]) if answers else NO_ANSWER
    is_right = bool(answers) and answer in targets
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    score = _SHARE_OF_MANY if tags > _MAX_TAGS else 1.0
    return {"score": score * is_right, "acc": float(is_right), "pred": answer}


def normalize(text: str) -> str:
    """Return the words of ``text`` in lower case, without punctuation and articles."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _targets(ground_truth: Any) -> list[str]:
    truth = ground_truth
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        truth = json.loads(truth)
    target = truth.get("target") if isinstance(truth, Mapping) else truth
    targets = [target] if isinstance(target, str) else target
    if not targets:
        raise ValueError(f"ground truth {ground_truth!r} has no target")
    return list(map(str, targets))
