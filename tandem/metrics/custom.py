# SPDX-License-Identifier: Apache-2.0
"""The user's metrics: functions of the batch of a training step (docs/extend/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.config.schema.imports import import_dotted, import_function
from tandem.errors import UserError
from tandem.metrics.names import find_metric
from tandem.types import Group

if TYPE_CHECKING:
    from torch import Tensor

_KEY = "trainer.metrics"
_SUCH = 'Return a dict such as {"my/metric": 1.0}.'


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The batch of one training step: N sequences with R response tokens.

    Attributes:
        groups: the prompts with their samples and rewards; sequences are in the order of samples.
        sequence_R: the sequence of each response token, int64, ascending.
        rewards_N: the rewards after any KL penalty, fp32; NaN if the reward failed.
        advantages_R, returns_R: the result of the advantage estimator, fp32.
        rollout_logp_R: the log-probs under the policy that drew the tokens, fp32.
        lag_R: the age of the weights that drew each token, in versions, int64.
    """

    step: int
    groups: Sequence[Group]
    sequence_R: Tensor
    rewards_N: Tensor
    advantages_R: Tensor
    returns_R: Tensor
    rollout_logp_R: Tensor
    lag_R: Tensor


def require_metrics(names: Sequence[str]) -> None:
    """Raise UserError unless every function of ``trainer.metrics`` can be imported and called."""
    for name in names:
        import_function(_KEY, name, arguments=("batch",))


def custom_metrics(names: Sequence[str], batch: StepBatch) -> dict[str, float]:
    """Compute the metrics of the functions ``trainer.metrics``.

    Raises:
        UserError: a function does not return a mapping of names to numbers, or returns a name that
            is already used.
    """
    metrics: dict[str, float] = {}
    for name in names:
        found: Any = import_dotted(_KEY, name)(batch)
        if not isinstance(found, Mapping):
            raise _refused(name, f"{type(found).__name__}, not a mapping", remedy=_SUCH)
        for metric, value in found.items():  # pyright: ignore[reportUnknownVariableType]
            if not isinstance(metric, str):
                raise _refused(name, f"the name {metric!r}, which is not a string", remedy=_SUCH)
            if metric in metrics or find_metric(metric) is not None:
                remedy = "Start the name with your own prefix, such as my/."
                rule = f"{metric}, which is the name of another metric"
                raise _refused(name, rule, remedy=remedy)
            metrics[metric] = _number(name, metric, value=value)
    return metrics


def _number(name: str, metric: str, *, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of many values
        remedy = "Return a float, or a tensor or array of one element."
        raise _refused(name, f"{metric}={value!r}, which is not a number", remedy=remedy) from error


def _refused(name: str, returned: str, *, remedy: str) -> UserError:
    return UserError(_KEY, name, rule=f"returned {returned}", remedy=remedy)
