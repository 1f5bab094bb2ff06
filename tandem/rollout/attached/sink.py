# SPDX-License-Identifier: Apache-2.0
"""The sink that sends weights to several servers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from tandem.api import EngineFailure
from tandem.rollout.attached.delivery import Delivery, Version
from tandem.rollout.attached.fleet import Fleet, Member
from tandem.rollout.attached.server import ServerLost
from tandem.types import SliceSpec


class AttachedSink:
    """An ``api.WeightSink`` over servers. A server that ends meanwhile is left out.

    Args:
        fleet: what the lost servers are taken out of.
        choose: returns the servers that receive a version, when it begins.
        name: the name of this run's weights, which no other run has.
        on_end: is told the version that all of them have.
    """

    def __init__(
        self,
        fleet: Fleet,
        manifest: Sequence[SliceSpec],
        *,
        choose: Callable[[], Sequence[Member]],
        name: str,
        keeps_cache: bool,
        on_end: Callable[[Version], None],
    ) -> None:
        self._fleet, self._manifest, self._choose = fleet, manifest, choose
        self._name, self._keeps_cache, self._on_end = name, keeps_cache, on_end
        self._missing: dict[str, None] = {}
        self._version = Version(-1, "")
        self._open: dict[Member, Delivery] = {}

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the tensors of a version."""
        return self._manifest

    def begin(self, version: int) -> None:
        """Pause the servers and open their models. Unfinished samples wait."""
        self.close()
        self._version = Version(version, f"{self._name}-{version}")
        self._missing = dict.fromkeys(spec.name for spec in self._manifest)
        for member in list(self._choose()):
            member.label, member.is_checked = "", False
            self._fleet.drop_canary(member)
            try:
                self._open[member] = Delivery(
                    member.server,
                    self._version,
                    manifest=self._manifest,
                    facts=member.facts,
                )
                member.facts = replace(member.facts, is_started=False)
            except ServerLost as loss:
                self._fleet.lose(member, str(loss))
        self._require_servers()

    def take(self, name: str, tensor: Tensor) -> None:
        """Send one tensor to all servers."""
        if name not in self._missing:
            raise EngineFailure(f"vLLM: weight {name} came twice, or is not in the manifest")
        del self._missing[name]
        self._on_each(lambda delivery: delivery.take(name, tensor))

    def end(self) -> None:
        """Let the servers go on with the version. Raise EngineFailure unless it is whole."""
        if self._missing:
            raise EngineFailure(f"vLLM: weights are missing: {', '.join(list(self._missing)[:3])}")
        self._on_each(lambda delivery: delivery.finish(keeps_cache=self._keeps_cache))
        for member in self._open:
            member.label = self._version.label
        self._open = {}
        self._on_end(self._version)

    def close(self) -> None:
        """Give an open version up. Its servers stay paused."""
        for delivery in self._open.values():
            delivery.close()
        self._open = {}

    def _on_each(self, call: Callable[[Delivery], None]) -> None:
        for member, delivery in list(self._open.items()):
            try:
                call(delivery)
            except ServerLost as loss:
                delivery.close()
                del self._open[member]
                self._fleet.lose(member, str(loss))
        self._require_servers()

    def _require_servers(self) -> None:
        if not self._open:
            raise EngineFailure(f"vLLM: no server is left; the last was {self._fleet.last_cause}")
