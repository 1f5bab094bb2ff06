# SPDX-License-Identifier: Apache-2.0
"""The check of a whole run on this machine: everything that a run does before it loads a model.

``tandem plan`` calls it. Nothing is written or started, and no weights are downloaded.
"""

from __future__ import annotations

from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver import sft, train
from tandem.driver.engine_choice import require_engine
from tandem.driver.launch import planned_site
from tandem.driver.run import CheckedRun, check_prepared


def check_here(config: RunConfig | SftConfig) -> CheckedRun:
    """Return the run of a checked configuration, ready to be started on this machine.

    Raises:
        UserError: ``tandem train`` or ``tandem sft`` would refuse the run, with the same message.
    """
    if isinstance(config, RunConfig):
        require_engine(config)
    site = planned_site(config)
    if isinstance(config, SftConfig):
        return check_prepared(site, sft.prepare(config, fetches_weights=False))
    return check_prepared(site, train.prepare(config, fetches_weights=False))
