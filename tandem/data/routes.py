# SPDX-License-Identifier: Apache-2.0
"""The recorded experts of the tokens of a conversation, joined over its turns.

A row of routes belongs to a token that was fed. A turn has the rows of all tokens before it, which
its prefill has fed once more, and of its own. A token keeps the row of the turn that first fed it:
that row is the one under which the next token was drawn.
"""

from __future__ import annotations

import numpy as np

from tandem.types import Trajectory


def routes_of(row: Trajectory) -> np.ndarray | None:
    """Return the routes of all tokens of a line of spans but the last, or None if a turn has none.

    An empty turn needs none. A line of empty turns only has no routes.

    Given tokens behind the last turn were fed by no engine. They repeat the last row that there is:
    nothing that carries loss depends on them.
    """
    found: np.ndarray | None = None
    num_tokens = 0
    for span in row.spans:
        num_tokens += len(span.token_ids)
        if span.completion is None or not span.token_ids:
            continue
        routes = span.completion.routes
        if routes is None or len(routes) != num_tokens - 1:
            return None
        found = routes if found is None else np.concatenate((found, routes[len(found) :]))
    if found is None:
        return None
    missing = num_tokens - 1 - len(found)
    return np.concatenate((found, found[-1:].repeat(missing, 0))) if missing else found
