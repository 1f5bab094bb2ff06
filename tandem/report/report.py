# SPDX-License-Identifier: Apache-2.0
"""The report of a run: one HTML file with curves, sampled rollouts and the configuration.

The file is self-contained: its content policy forbids network access and other files. Its size is
bounded: curves are thinned, and rollouts are sampled evenly. Text from models and data enters the
page only as JSON that scripts insert as text, or through jinja2's escaping.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import jinja2
from markupsafe import Markup

from tandem.errors import UserError
from tandem.metrics.records import spread
from tandem.report.headline import banner, flatten, subtitle, tiles, title
from tandem.report.run_folder import RunData, read_run
from tandem.report.series import charts, curves
from tandem.report.timeline import timeline

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_ROLLOUTS = 400
_MAX_TOKENS_SHOWN = 150_000
_MAX_TOKENS_PER_ROLLOUT = 2048
_MAX_PROMPT_CHARACTERS = 8000
_MAX_PICTURE_BYTES = 2_000_000
_PICTURE = "data:image/"
_SCRIPT_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_report(
    run_folder: Path, output: Path, *, forecast: Sequence[tuple[str, str]] = ()
) -> Path:
    """Write the report of a run, finished or not, and return ``output``.

    Args:
        forecast: rows of the predicted and the achieved speed of the run.

    Raises:
        UserError: the folder has no run, a file in it is damaged, or ``output`` cannot be written.
    """
    page = render(read_run(run_folder), forecast)
    if output.is_dir():
        rule = "is a folder"
        raise UserError("--output", str(output), rule=rule, remedy="Give the path of a file.")
    partial = output.with_name(output.name + ".partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, output)
    except OSError as error:
        raise UserError(
            "--output",
            str(output),
            rule=f"cannot be written ({error.strerror})",
            remedy="Give a path that can be written.",
        ) from error
    return output


def render(run: RunData, forecast: Sequence[tuple[str, str]] = ()) -> str:
    """Render the page as text; see ``write_report`` for ``forecast``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rollouts = select_rollouts(run.rollouts)
    data = {
        "curves": curves(run.columns),
        "charts": [asdict(chart) for chart in charts(run.columns)],
        "rollouts": rollouts,
    }
    return environment.get_template("report.html").render(
        title=title(run),
        subtitle=subtitle(run),
        banner=banner(run),
        tiles=tiles(run),
        timeline=timeline(run.trace, run.columns),
        forecast=forecast,
        summary=flatten(run.summary),
        config=flatten(run.config),
        changes=[
            (record["step"], key, before, after)
            for record in run.settings
            for key, (before, after) in record["changed"].items()
        ],
        restarts=run.restarts,
        engine_restarts=engine_restarts(run),
        num_recorded=len(run.rollouts),
        num_shown=len(rollouts),
        data=script_json(data),
        style=_asset("report.css"),
        scripts=[_asset("charts.js"), _asset("rollouts.js")],
    )


def engine_restarts(run: RunData) -> list[tuple[int, int]]:
    """Return the steps in which rollout engines or their workers were started again, and how often
    in each.
    """
    column = run.columns.get("rollout/engine/num_restarts", ())
    return [(step, int(number)) for step, number in column if number > 0]


def script_json(value: Any) -> Markup:
    """Encode JSON for a script element, without characters that end it or start a tag."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    return Markup(text.translate(_SCRIPT_ESCAPES))


def select_rollouts(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Select rollouts evenly over the run, with bounded lengths and a bounded total."""
    limit = _MAX_ROLLOUTS
    while True:
        chosen = [_shown(records[index]) for index in spread(len(records), limit, offset=0)]
        num_tokens = sum(len(record["tokens"]) for record in chosen)
        num_bytes = sum(len(picture) for record in chosen for picture in record["pictures"])
        if limit == 1 or (num_tokens <= _MAX_TOKENS_SHOWN and num_bytes <= _MAX_PICTURE_BYTES):
            return chosen
        limit //= 2


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    tokens = list(record.get("tokens") or ())
    return {
        "step": record["step"],
        "id": record.get("sample_id"),
        "source": record.get("data_source"),
        "prompt": _cut(str(record.get("prompt", ""))),
        "pictures": _pictures(record.get("pictures")),
        "response": _cut(str(record.get("response", ""))),
        "truth": record.get("ground_truth"),
        "score": record.get("score"),
        "status": record.get("status", "value"),
        "detail": record.get("detail", ""),
        "extra": record.get("extra") or {},
        "advantage": record.get("advantage"),
        "finish": record.get("finish_reason"),
        "length": len(tokens),
        "version": record.get("weights_version"),
        "episode": record.get("episode"),
        # The texts of spans are in the tokens already.
        "spans": [
            {name: value for name, value in span.items() if name != "text"}
            for span in record.get("spans") or ()
        ],
        "tokens": tokens[:_MAX_TOKENS_PER_ROLLOUT],
        "logp": list(record.get("log_probs") or ())[:_MAX_TOKENS_PER_ROLLOUT],
    }


def _pictures(found: Any) -> list[str]:
    """Return the thumbnails of a record, and nothing else that stands in their place."""
    every = cast(list[Any], found) if isinstance(found, list) else []
    return [x for x in every if isinstance(x, str) and x.startswith(_PICTURE)]


def _cut(text: str) -> str:
    if len(text) <= _MAX_PROMPT_CHARACTERS:
        return text
    return text[:_MAX_PROMPT_CHARACTERS] + f" ... ({len(text)} characters)"


def _asset(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))
