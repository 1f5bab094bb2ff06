# SPDX-License-Identifier: Apache-2.0
"""``pools.*``: the platform of each pool of devices, and the transport of weights between pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.config.schema.fields import SECTION, Section

Transport = Literal["auto", "collective", "flagcx", "staged"]
HALVES = (("actor-train", "logp", "ref_logp"), ("generate",))
"""The groups of tasks where generation has devices of its own and no groups are named."""


class PoolConfig(Section):
    """``pools.<task>.*``: the pool that performs the task."""

    platform: str | None = Field(
        default=None,
        description="Platform of the devices that perform this task, named as in trainer.device. "
        "null: the platform of another task of the same pool, or trainer.device.",
    )


class PoolsConfig(BaseModel):
    """The pools, each named by a task that it performs (``trainer.separated_node_tasks``)."""

    model_config = SECTION | ConfigDict(populate_by_name=True)

    actor_train: PoolConfig = Field(
        default_factory=PoolConfig, alias="actor-train", description="Pool that trains the policy."
    )
    logp: PoolConfig = Field(
        default_factory=PoolConfig, description="Pool that computes old log-probs."
    )
    ref_logp: PoolConfig = Field(
        default_factory=PoolConfig,
        description="Pool that computes log-probs of the reference policy.",
    )
    generate: PoolConfig = Field(default_factory=PoolConfig, description="Pool that generates.")
    transport: Transport = Field(
        default="auto",
        description="Transport of weights to other pools. collective: the vendor's communication "
        "library; flagcx: between devices of different vendors; staged: through host memory; auto: "
        "the fastest available.",
    )

    @property
    def named(self) -> Mapping[str, str]:
        """The platform of each task for which ``pools.<task>.platform`` is set."""
        given = {
            "actor-train": self.actor_train.platform,
            "logp": self.logp.platform,
            "ref_logp": self.ref_logp.platform,
            "generate": self.generate.platform,
        }
        return {task: platform for task, platform in given.items() if platform is not None}
