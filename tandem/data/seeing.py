# SPDX-License-Identifier: Apache-2.0
"""The rows of a data set for a model that sees: their pictures, and prompts with their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.data.files import RowFault, RowSource
from tandem.data.images import (
    PictureRule,
    PictureSource,
    expand,
    find_pictures,
    marked,
    measure,
    require_room,
)
from tandem.data.selection import UsedRows


@dataclass(frozen=True, slots=True)
class SeenRows:
    """The pictures of rows, and their prompts with the model's own text in place of the marks."""

    source: RowSource
    rule: PictureRule
    chats: Mapping[int, Any]
    pictures: Mapping[int, tuple[PictureSource, ...]]

    def expand(self, number: int, token_ids: Sequence[int]) -> np.ndarray:
        """Return the tokens of a row with those of its pictures. Raise UserError as ``expand``."""
        try:
            return expand(token_ids, self.pictures[number], rule=self.rule)
        except RowFault as fault:
            raise self.source.fault(number, fault) from fault


def see_rows(
    used: UsedRows,
    config: DataConfig,
    *,
    rule: PictureRule,
    agents: Mapping[int, str],
    validation: bool,
) -> SeenRows:
    """Find and measure the pictures of all rows, whose tokens get ids in the order of the rows.

    Args:
        agents: the agent of each row, "" for a single turn.

    Raises:
        UserError: a row's pictures do not fit its prompt, or one of them cannot be read.
    """
    chats: dict[int, Any] = {}
    pictures: dict[int, tuple[PictureSource, ...]] = {}
    first_id = rule.first_id(validation=validation)
    for number, row in used.rows.items():
        prompt = row[config.prompt_key]
        try:
            found = find_pictures(row, prompt, rule=rule)
            if found:
                _require_plain(config, agents[number])
            place = f"row {number} of {used.source.key}"
            pictures[number] = measure(found, rule, first_id=first_id, place=place)
        except RowFault as fault:
            raise used.source.fault(number, fault) from fault
        chats[number] = marked(prompt, rule)
        first_id += sum(picture.num_tokens for picture in pictures[number])
    require_room(first_id, rule, validation=validation)
    return SeenRows(used.source, rule, chats, pictures)


def _require_plain(config: DataConfig, agent: str) -> None:
    """Raise RowFault if a row with pictures would be truncated, or answered by an agent."""
    if config.truncation != "error" and not config.filter_overlong_prompts:
        rule = f"has pictures, which data.truncation={config.truncation} could cut"
        raise RowFault(rule, "Set data.truncation=error or data.filter_overlong_prompts=True.")
    if agent:
        rule = f"has pictures and the agent {agent}, which are not built together"
        raise RowFault(rule, "Remove agent_name or the pictures.")
