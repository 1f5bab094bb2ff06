# SPDX-License-Identifier: Apache-2.0
"""The charts of the report with their metrics, and the thinning of long curves.

Thinning averages neighbouring steps and keeps their extremes, so that spikes stay visible. A chart
is omitted if the run has none of its metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

MAX_POINTS = 400
_SIGNIFICANT = 5

Column = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A chart; ``metrics`` maps the names of metrics to their labels.

    ``unit`` follows numbers. ``share`` shows the whole range 0..1 if it contains the values.
    ``exact`` curves are never smoothed. ``stacked`` curves add up.
    """

    section: str
    title: str
    note: str
    metrics: Mapping[str, str]
    unit: str = ""
    share: bool = False
    exact: bool = False
    stacked: bool = False


_OPTIMIZATION = "Optimization"
_PIPELINE = "Pipeline"
_SPEED = "Speed"
_ROLES = ("generate", "actor-train", "logp", "ref_logp")
_EFFECTIVE = "rollout_corr/rollout_is_eff_sample_size"
_LAGS = {"": "all", **{f"/lag_{lag}": f"lag {lag}" for lag in range(5)}}

CHARTS = (
    ChartSpec(
        "Learning",
        "Training reward",
        "mean score of the step's rollouts",
        {"critic/score/mean": "score", "critic/rewards/mean": "after KL penalty"},
        share=True,
    ),
    ChartSpec(
        "Learning", "Loss", "per token", {"train/loss": "training", "val/loss": "validation"}
    ),
    ChartSpec("Learning", "Response length", "mean, tokens", {"response_length/mean": "tokens"}),
    ChartSpec(
        "Learning",
        "Calls of tools",
        "mean per episode",
        {"agent/calls/mean": "training", "val-aux/agent/calls/mean": "validation"},
    ),
    ChartSpec(
        "Learning",
        "Groups without a signal",
        "share whose samples score the same",
        {"reward/zero_variance_group_ratio": "share"},
        share=True,
    ),
    ChartSpec(
        "Learning",
        "Clipped responses",
        "share that reached the length limit",
        {"response_length/clip_ratio": "share"},
    ),
    ChartSpec(
        "Learning",
        "Failed rewards",
        "excluded from training, per step",
        {"reward/timeouts": "timeouts", "reward/errors": "errors"},
    ),
    ChartSpec(_OPTIMIZATION, "Entropy", "of the policy, nats", {"actor/entropy": "entropy"}),
    ChartSpec(_OPTIMIZATION, "Policy drift", "KL from the rollout policy", {"actor/ppo_kl": "KL"}),
    ChartSpec(
        _OPTIMIZATION, "Reference KL", "KL from the reference policy", {"actor/kl_loss": "KL"}
    ),
    ChartSpec(
        _OPTIMIZATION,
        "Clip fraction",
        "tokens outside the trust region",
        {"actor/pg_clipfrac": "ratio clip", "actor/pg_clipfrac_lower": "dual clip"},
    ),
    ChartSpec(
        _OPTIMIZATION,
        "Gradient norm",
        "before clipping",
        {"actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": "norm"},
    ),
    ChartSpec(
        _OPTIMIZATION,
        "Learning rate",
        "of the step",
        {"actor/lr": "actor", "critic/lr": "critic", "train/lr": "rate"},
        exact=True,
    ),
    ChartSpec(_OPTIMIZATION, "Policy loss", "clipped surrogate", {"actor/pg_loss": "loss"}),
    ChartSpec(_OPTIMIZATION, "Value loss", "of the critic", {"critic/vf_loss": "loss"}),
    ChartSpec(
        _OPTIMIZATION,
        "Explained variance",
        "of the returns, by the critic's values",
        {"critic/vf_explained_var": "share"},
    ),
    ChartSpec(
        _OPTIMIZATION,
        "Effective sample size",
        "share of tokens that count after importance weights",
        {f"{_EFFECTIVE}{lag}": label for lag, label in _LAGS.items()},
        share=True,
    ),
    ChartSpec(
        _OPTIMIZATION,
        "Mismatch of rollout and trainer",
        "KL per token, by lag",
        {f"rollout_corr/kl{lag}": label for lag, label in _LAGS.items()},
    ),
    ChartSpec(
        _PIPELINE,
        "Lag",
        "weights versions between sampling and training",
        {"training/lag/mean": "mean of tokens", "training/lag/max": "oldest sample"},
    ),
    ChartSpec(
        _PIPELINE,
        "Idle",
        "share of the wall time of a step",
        {f"pipeline/idle_share/{role}": role for role in _ROLES},
        share=True,
    ),
    ChartSpec(
        _PIPELINE,
        "Wall time of a step",
        "with data, validation and saving",
        {"pipeline/wall_s": "step"},
        unit=" s",
    ),
    ChartSpec(
        _SPEED,
        "Throughput",
        "tokens per second and device",
        {"perf/throughput": "step", "perf/wall_throughput": "wall clock"},
    ),
)

_STEP = "timing_s/step"
_TESTING = "timing_s/testing"
_OTHER = "timing_s/(other)"
_ONLY_IF_NONZERO = ("reward/timeouts", "reward/errors")


def curves(columns: Mapping[str, Column]) -> dict[str, dict[str, list[float]]]:
    """Thin every metric, and add the seconds of a step outside its sections."""
    return {name: thin(column) for name, column in sorted({**columns, **_rest(columns)}.items())}


def thin(column: Column) -> dict[str, list[float]]:
    """Reduce to ``MAX_POINTS`` points: steps ``x``, means ``y`` and, if thinned, ``lo``, ``hi``."""
    size = -(-len(column) // MAX_POINTS)
    if size <= 1:
        return {"x": [step for step, _ in column], "y": [_short(value) for _, value in column]}
    curve: dict[str, list[float]] = {"x": [], "y": [], "lo": [], "hi": []}
    for begin in range(0, len(column), size):
        part = column[begin : begin + size]
        values = [value for _, value in part]
        curve["x"].append(part[-1][0])
        curve["y"].append(_short(sum(values) / len(values)))
        curve["lo"].append(_short(min(values)))
        curve["hi"].append(_short(max(values)))
    return curve


def charts(columns: Mapping[str, Column]) -> list[ChartSpec]:
    """Return the charts for which the run has data, each with the metrics of the run."""
    specs = [CHARTS[0], _validation_chart(columns), *CHARTS[1:], _time_chart(columns)]
    return [chart for chart in (_present(spec, columns) for spec in specs) if chart.metrics]


def validation_names(columns: Mapping[str, Column]) -> list[str]:
    """Return the metrics ``val-core/<source>/<variable>/mean@N``."""
    return [name for name in columns if name.startswith("val-core/") and "/mean@" in name]


def _validation_chart(columns: Mapping[str, Column]) -> ChartSpec:
    labels = {name: name.removeprefix("val-core/") for name in validation_names(columns)}
    note = "mean over held-out prompts"
    return ChartSpec("Learning", "Validation", note, labels, share=True, exact=True)


def _time_chart(columns: Mapping[str, Column]) -> ChartSpec:
    """Return the chart of the sections of a step, the longest at the bottom."""
    names = sorted(_sections(columns), key=lambda name: -sum(value for _, value in columns[name]))
    labels = {name: name.removeprefix("timing_s/") for name in names}
    if labels:
        labels[_OTHER] = "other"
    return ChartSpec(_SPEED, "Time of a step", "by stage", labels, unit=" s", stacked=True)


def _sections(columns: Mapping[str, Column]) -> list[str]:
    if _STEP not in columns:
        return []
    return [
        name
        for name in columns
        if name.startswith("timing_s/") and name not in (_STEP, _TESTING, _OTHER)
    ]


def _rest(columns: Mapping[str, Column]) -> dict[str, Column]:
    names = _sections(columns)
    if not names:
        return {}
    explained: dict[int, float] = {}
    for name in names:
        for step, value in columns[name]:
            explained[step] = explained.get(step, 0.0) + value
    rest = [(step, max(0.0, total - explained.get(step, 0.0))) for step, total in columns[_STEP]]
    return {_OTHER: rest}


def _present(spec: ChartSpec, columns: Mapping[str, Column]) -> ChartSpec:
    """Keep the metrics worth drawing: no zero failures, and no duplicate curves."""
    kept: dict[str, str] = {}
    drawn: list[Column] = []
    for name, label in spec.metrics.items():
        column = columns.get(name, ())
        if name == _OTHER or (column and column not in drawn and _worth_drawing(name, column)):
            kept[name] = label
            drawn.append(column)
    return replace(spec, metrics=kept)


def _worth_drawing(name: str, column: Column) -> bool:
    return name not in _ONLY_IF_NONZERO or any(value for _, value in column)


def _short(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT}g}")
