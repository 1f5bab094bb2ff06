# SPDX-License-Identifier: Apache-2.0
"""The JSON object of a file of a model or a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast


def read_object(path: Path) -> dict[str, Any]:
    """Read a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no JSON object. The text completes a sentence whose subject is the
            file.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("is not valid JSON (it is nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    return cast(dict[str, Any], content)
