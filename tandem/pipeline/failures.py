# SPDX-License-Identifier: Apache-2.0
"""Says on the console that rewards failed, and why; what they are counted as is ``metrics``'s."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tandem.types import Group, RewardStatus

logger = logging.getLogger(__name__)


def warn_of_failed_rewards(groups: Sequence[Group], what: str) -> None:
    """One warning with the number of failures and the cause of the first; none without failures.

    Args:
        what: the groups in words, such as ``step 3``.
    """
    outcomes = [sample.reward for group in groups for sample in group.samples]
    failed = [outcome for outcome in outcomes if outcome.status is not RewardStatus.VALUE]
    if failed:
        logger.warning(
            "%s: %d of %d rewards failed and do not count; the first: %s",
            what,
            len(failed),
            len(outcomes),
            failed[0].detail,
        )
