# SPDX-License-Identifier: Apache-2.0
"""``pools.*``: on whose devices each task runs, and how weights travel between pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.config.schema.fields import SECTION

Transport = Literal["auto", "collective", "flagcx", "staged"]


class PoolConfig(BaseModel):
    """``pools.<task>.*``: the pool that does this task."""

    model_config = SECTION

    platform: str | None = Field(
        default=None,
        description="Platform of its devices, as trainer.device names them; null: trainer.device, "
        "or what another task of the same pool says.",
    )


class PoolsConfig(BaseModel):
    """Pools by a task that they do; see ``trainer.separated_node_tasks``."""

    model_config = SECTION | ConfigDict(populate_by_name=True)

    actor_train: PoolConfig = Field(
        default_factory=PoolConfig, alias="actor-train", description="Where the policy is trained."
    )
    logp: PoolConfig = Field(
        default_factory=PoolConfig, description="Where the policy scores before an update."
    )
    ref_logp: PoolConfig = Field(
        default_factory=PoolConfig, description="Where the reference policy scores."
    )
    generate: PoolConfig = Field(default_factory=PoolConfig, description="Where rollouts run.")
    transport: Transport = Field(
        default="auto",
        description="How weights travel to other pools: collective (the devices' own library), "
        "flagcx (between vendors), staged (through the hosts' memory); auto: the fastest there is.",
    )

    @property
    def named(self) -> Mapping[str, str]:
        """The platforms that are named, by task."""
        given = {
            "actor-train": self.actor_train.platform,
            "logp": self.logp.platform,
            "ref_logp": self.ref_logp.platform,
            "generate": self.generate.platform,
        }
        return {task: platform for task, platform in given.items() if platform is not None}
