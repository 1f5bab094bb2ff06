# SPDX-License-Identifier: Apache-2.0
"""Compares the metrics of two runs that compute the same in fp32, on different devices.

The bounds follow from the sizes of the tiny run, with the unit roundoff u = 2**-24. A value that
goes through n accumulations is off by at most 4 sqrt(n) u of its size with a probability of 0.999
(Higham and Mary 2019, theorem 2.4), in whatever order a processor adds.

- A log-prob of the tiny model: each of two layers accumulates 334 terms (norms 64, projections 160,
  attention 110), the final norm, the head and the normalization 560 more: n = 1230. A log-prob is
  about -6.2. The largest difference of two log-probs differs between two runs by twice that bound.
- A mean over the 192 response tokens of a step is off by sqrt(192) times less; twice that where the
  mean is one of squares.
- A sample deviation is the root of a difference of two sums of 192 terms that are about 1. Its
  square has the error of these sums: one of the mean square and two of the squared mean.

An update of AdamW with a gradient that is off by a relative 1e-5 is off by 1e-4 in the mean (see
``tandem.testing.contracts.model``), which changes log-probs by less than the bounds above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pytest

UNIT_ROUNDOFF = 2.0**-24
LOG_PROB = 6.2
NUM_TOKENS = 192
OF_ONE_TOKEN = 2 * 4 * math.sqrt(1230) * UNIT_ROUNDOFF * LOG_PROB
OF_MEANS = 2 * OF_ONE_TOKEN / math.sqrt(NUM_TOKENS)
OF_SQUARED_DEVIATIONS = 3 * 4 * math.sqrt(NUM_TOKENS) * UNIT_ROUNDOFF
SINGLE_TOKENS = (
    "training/rollout_logp_diff_max",
    "rollout_corr/rollout_is_max",
    "rollout_corr/rollout_is_min",
    "rollout_corr/rollout_is_seq_",
    "rollout_corr/log_ppl_diff_m",
    "rollout_corr/chi2_seq",
)
"""Metrics of the token, or the response, that stands out most."""

Metrics = Mapping[int, Mapping[str, float]]


def differences(found: Metrics, expected: Metrics) -> Iterator[str]:
    """Yield the metrics by step that differ by more than their bounds."""
    assert found.keys() == expected.keys()
    for step, metrics in expected.items():
        assert found[step].keys() == metrics.keys()
        for name, value in metrics.items():
            if not is_same(name, found[step][name], value):
                yield f"step {step}: {name}={found[step][name]}, expected {value}"


def is_same(name: str, found: float, expected: float) -> bool:
    """Whether two values of a metric agree to within the bound of ``name``."""
    if name.partition("/lag_")[0] == "rollout_corr/rollout_is_std":
        return found**2 == pytest.approx(expected**2, abs=OF_SQUARED_DEVIATIONS)
    bound = OF_ONE_TOKEN if name.startswith(SINGLE_TOKENS) else OF_MEANS
    return found == pytest.approx(expected, abs=bound, rel=OF_MEANS)
