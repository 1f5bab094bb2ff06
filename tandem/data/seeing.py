# SPDX-License-Identifier: Apache-2.0
"""The rows of a data set for a model that sees: their pictures, and prompts with their places."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.data.files import Row, RowFault, RowSource
from tandem.data.images import (
    PictureRule,
    PictureSource,
    expand,
    find_pictures,
    marked,
    measure,
    require_no_pictures,
    require_room,
)
from tandem.data.selection import UsedRows
from tandem.data.threads import in_threads

logger = logging.getLogger(__name__)

CHECK_S = 30.0
"""The time for which pictures of a data set are decoded before the run starts."""


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
        UserError: a row's pictures do not fit its prompt, or one of them cannot be read, or is
            damaged.
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
    require_whole(pictures, used.source)
    return SeenRows(used.source, rule, chats, pictures)


class RowPictures:
    """The pictures of the rows of demonstrations, found while the rows are rendered one by one.

    Attributes:
        pictures: the pictures of each row that has been rendered.
    """

    def __init__(
        self, source: RowSource, column: str, *, rule: PictureRule | None, validation: bool
    ) -> None:
        """Begin before the first row. Without a ``rule``, rows must have no pictures."""
        self.source, self.rule = source, rule
        self.pictures: dict[int, tuple[PictureSource, ...]] = {}
        self._column, self._validation = column, validation
        self._first_id = 0 if rule is None else rule.first_id(validation=validation)
        self._number, self._row = 0, Row()

    def begin(self, number: int, row: Row) -> None:
        """Begin a row. Raise RowFault if it has pictures, and the model reads text only."""
        self._number, self._row = number, row
        if self.rule is None:
            require_no_pictures(row, (self._column,))

    def mark(self, prompt: Any) -> Any:
        """Return the prompt of the row with the model's own text in place of its marks.

        Raises:
            RowFault: the pictures do not fit the prompt, or one of them cannot be read.
        """
        rule = self.rule
        if rule is None:
            return prompt
        found = find_pictures(self._row, prompt, rule=rule)
        place = f"row {self._number} of {self.source.key}"
        measured = measure(found, rule, first_id=self._first_id, place=place)
        self.pictures[self._number] = measured
        self._first_id += sum(picture.num_tokens for picture in measured)
        require_room(self._first_id, rule, validation=self._validation)
        return marked(prompt, rule)


def require_whole(pictures: Mapping[int, Sequence[PictureSource]], source: RowSource) -> None:
    """Decode the pictures of rows, several at once, and keep nothing.

    It begins with the first rows and stops after ``CHECK_S``.

    Raises:
        UserError: a picture is damaged.
    """
    listed = [(row, *entry) for row, found in pictures.items() for entry in enumerate(found, 1)]
    if not listed:
        return
    begin = "%s: looking for damaged pictures, for at most %g s"
    logger.info(begin, source.key, CHECK_S)
    deadline = time.monotonic() + CHECK_S

    def damage_of(entry: tuple[int, int, PictureSource]) -> str | None:
        return entry[2].damage() if time.monotonic() < deadline else None

    damages = in_threads(damage_of, listed)
    for (row, number, _), damage in zip(listed, damages, strict=True):
        if damage:
            rule = f"has a picture (number {number}) that is damaged ({damage})"
            raise source.fault(row, RowFault(rule))
    num_checked = len(listed) - damages.count(None)
    end = "%s: %d of %d pictures were decoded, and none of them is damaged"
    logger.info(end, source.key, num_checked, len(listed))


def expand_example(
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    *,
    pictures: Sequence[PictureSource],
    rule: PictureRule,
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and mask of a demonstration with the tokens of pictures, which have no loss.

    Raises:
        RowFault: the rendered row does not have a placeholder for each picture.
    """
    expanded = expand(token_ids.tolist(), pictures, rule=rule)
    counts = np.ones(len(token_ids), dtype=np.int64)
    counts[token_ids == rule.placeholder] = [picture.num_tokens for picture in pictures]
    mask = np.repeat(loss_mask, counts)
    return expanded, mask & (expanded < rule.vocabulary)


def _require_plain(config: DataConfig, agent: str) -> None:
    """Raise RowFault if a row with pictures would be truncated, or answered by an agent."""
    if config.truncation != "error" and not config.filter_overlong_prompts:
        rule = f"has pictures, which data.truncation={config.truncation} could cut"
        raise RowFault(rule, "Set data.truncation=error or data.filter_overlong_prompts=True.")
    if agent:
        rule = f"has pictures and the agent {agent}, which are not built together"
        raise RowFault(rule, "Remove agent_name or the pictures.")
