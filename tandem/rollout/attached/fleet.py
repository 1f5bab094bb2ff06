# SPDX-License-Identifier: Apache-2.0
"""The servers of a run: which of them take part, and the requests that are under way there.

A server that ends, stands still or does not answer is left out (``lose``). It is asked again every
ten seconds, or less often if that takes long, as is each URL that was added to the file of URLs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from tandem.api import EngineFailure
from tandem.errors import UserError
from tandem.rollout.attached.fit import Misfit, ServerFacts, require_alike
from tandem.rollout.attached.samples import GENERATE, Answer, Sample, read_answer
from tandem.rollout.attached.server import Exchange, Server, ServerLost

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""How often servers that do not take part are asked."""
MAX_RETRY_S = 640.0
"""The longest time until a server that took long to fail is asked again."""
AGAIN_S = 1.0
"""How long a server may then take to answer at all: meanwhile no samples are sent."""
SILENCE_S = 5.0
"""A server that answers nothing for so long is asked whether it is there."""
PAUSED = "/is_paused"
PROBES = (("/health", 10.0), ("/weight_info", 120.0), (PAUSED, 120.0))
"""What it must answer, and within how many seconds. The first is answered by the process that
listens, the others by the engine between two of its steps, which may be long."""


@dataclass(slots=True, eq=False)
class Member:
    """A server that takes part.

    Attributes:
        label: the weights that it has; "" for none of this run.
        is_checked: whether it has passed the canary with them.
        running: the samples under way there.
        held: finished samples that wait until it has passed the canary.
        probes: when each probe that is under way was sent.
        heard: when it last answered.
        num_paused: how often it has said that it is paused, since it last finished a sample.
    """

    server: Server
    facts: ServerFacts
    label: str = ""
    is_checked: bool = False
    running: dict[Exchange, Sample] = field(default_factory=dict[Exchange, Sample])
    held: list[tuple[Sample, Answer]] = field(default_factory=list[tuple[Sample, Answer]])
    probes: dict[Exchange, tuple[float, float]] = field(
        default_factory=dict[Exchange, tuple[float, float]]
    )
    heard: float = 0.0
    num_paused: int = 0


@dataclass(frozen=True, slots=True)
class _Wait:
    """The time for which a server is not asked: its end, and how long it is."""

    until: float
    wait_s: float


class Fleet:
    """The servers of a run.

    Args:
        list_urls: returns the URLs of the moment.
        require_usable: raises UserError unless a URL can be used.
        check: returns the facts of a server, or raises ServerLost or Misfit.
    """

    def __init__(
        self,
        list_urls: Callable[[], Sequence[str]],
        *,
        require_usable: Callable[[str], None],
        check: Callable[[Server], ServerFacts],
    ) -> None:
        self._list_urls, self._require_usable, self._check = list_urls, require_usable, check
        self._selector = DefaultSelector()
        self._asked_again = time.monotonic()
        self._waits: dict[str, _Wait] = {}
        self._told: dict[str, str] = {}
        self._unfinished: list[Sample] = []
        self._last_cause = ""
        self._first: ServerFacts | None = None
        self.members: list[Member] = []
        self.num_lost = 0
        for url in list_urls():
            self._attach(url)

    @property
    def last_cause(self) -> str:
        """The server that was lost last, and why."""
        return self._last_cause

    @property
    def is_in_doubt(self) -> bool:
        """Whether a server has been asked whether it is there, and has not answered yet."""
        return any(member.probes for member in self.members)

    def send(self, member: Member, sample: Sample) -> bool:
        """Send a sample to a server. Return False if the server is lost."""
        try:
            exchange = member.server.ask(GENERATE, sample.request(member.label))
        except ServerLost as loss:
            self._unfinished.append(sample)
            self.lose(member, str(loss))
            return False
        if not member.running:
            member.heard = time.monotonic()
        member.running[exchange] = sample
        self._selector.register(exchange, EVENT_READ, member)
        return True

    def wait(self, timeout_s: float) -> Iterator[tuple[Member, Sample, Answer]]:
        """Wait until at least one sample is finished, at most so long. Yield those that are."""
        for key, _ in self._selector.select(timeout_s):
            member: Member = key.data
            exchange: Any = key.fileobj
            if exchange not in member.running and exchange not in member.probes:
                continue  # its server was lost a moment ago
            self._selector.unregister(exchange)
            member.heard = time.monotonic()
            try:
                if exchange in member.probes:
                    del member.probes[exchange]
                    self._note_probe(member, exchange.path, content=exchange.result())
                    continue
                sample = member.running.pop(exchange)
                member.num_paused = 0
                try:
                    answer = read_answer(exchange.result(), sample)
                except ServerLost:
                    self._unfinished.append(sample)
                    raise
            except ServerLost as loss:
                self.lose(member, str(loss))
            else:
                yield member, sample, answer
        self._probe()

    def lose(self, member: Member, cause: str) -> None:
        """Leave a server out. Its samples are among ``take_unfinished``."""
        if member not in self.members:
            return
        self.members.remove(member)
        self._unfinished += [*member.running.values(), *(sample for sample, _ in member.held)]
        member.held = []
        for exchange in [*member.running, *member.probes]:
            if exchange in self._selector.get_map():
                self._selector.unregister(exchange)
            exchange.close()
        member.running, member.probes = {}, {}
        self.num_lost += 1
        self._last_cause = f"{member.server.url}: {cause}"
        self._asked_again = time.monotonic()
        logger.warning(
            "The rollout server %s is left out: %s. %d unfinished samples are generated again; "
            "servers that take part: %d",
            member.server.url,
            cause,
            len(self._unfinished),
            len(self.members),
        )

    def drop_canary(self, member: Member) -> None:
        """Give the canary up that a server generates: its weights are about to change."""
        for exchange in [one for one, sample in member.running.items() if sample.is_canary]:
            del member.running[exchange]
            self._selector.unregister(exchange)
            exchange.close()

    def take_unfinished(self) -> list[Sample]:
        """Return the samples of lost servers, once, by their ids."""
        found, self._unfinished = self._unfinished, []
        return sorted(found, key=lambda sample: sample.sample_id)

    def find_more(self) -> list[Member]:
        """Return servers that answer and do not take part yet. They are asked every ten seconds.

        One that takes long to fail, and holds the run up meanwhile, is asked half as often each
        time.
        """
        now = time.monotonic()
        if now - self._asked_again < RETRY_S:
            return []
        found = self._ask_others(now)
        self._asked_again = time.monotonic()  # not before: an answer may take a minute
        return found

    def _ask_others(self, now: float) -> list[Member]:
        """Return servers that answer among those that take no part and are due."""
        taking_part = {member.server.url for member in self.members}
        found: list[Member] = []
        try:
            urls = self._list_urls()
        except UserError as error:
            self._tell_once("", error)
            return []
        for url in urls:
            if url in taking_part or (url in self._waits and now < self._waits[url].until):
                continue
            begun = time.monotonic()
            try:
                self._require_usable(url)
                server = Server(url)
                server.get("/health", timeout_s=AGAIN_S)
                found.append(Member(server, self._facts_of(server)))
            except (ServerLost, EngineFailure, Misfit, UserError) as problem:
                self._tell_once(url, problem)
                self._put_off(url, begun)
        return found

    def _put_off(self, url: str, begun: float) -> None:
        """Note when a server that was asked at ``begun`` and failed is asked again."""
        now, last = time.monotonic(), self._waits.pop(url, None)
        if now - begun >= AGAIN_S:
            wait_s = RETRY_S if last is None else min(2 * last.wait_s, MAX_RETRY_S)
            self._waits[url] = _Wait(now + wait_s, wait_s)

    def _tell_once(self, url: str, problem: Exception) -> None:
        """Warn of what keeps a server out, unless that has been said."""
        if self._told.get(url) != str(problem):
            self._told[url] = str(problem)
            what = f"The rollout server {url} takes no part" if url else "No server can be added"
            logger.warning("%s: %s", what, problem)

    def join(self, member: Member) -> None:
        """Let a server take part."""
        self._told.pop(member.server.url, None)
        self._waits.pop(member.server.url, None)
        self.members.append(member)
        logger.info(
            "The rollout server %s takes part; servers: %d", member.server.url, len(self.members)
        )

    def close(self) -> None:
        """Give up all that is under way."""
        for member in self.members:
            for exchange in [*member.running, *member.probes]:
                exchange.close()
        self._selector.close()
        self.members = []

    def _attach(self, url: str) -> None:
        self._require_usable(url)
        server = Server(url)
        self.members.append(Member(server, self._facts_of(server)))

    def _facts_of(self, server: Server) -> ServerFacts:
        """Check a server, alone and against the first one."""
        facts = self._check(server)
        self._first = self._first or facts
        require_alike(facts, self._first)
        return facts

    def _probe(self) -> None:
        """Ask servers that have been silent whether they are there, and lose those that are not."""
        now = time.monotonic()
        for member in list(self.members):
            late = [limit for since, limit in member.probes.values() if now - since > limit]
            if late:
                self.lose(member, f"it has not answered for {late[0] + SILENCE_S:.0f} s")
            elif member.running and not member.probes and now - member.heard > SILENCE_S:
                self._ask_whether_there(member, now)

    def _note_probe(self, member: Member, path: str, *, content: Any) -> None:
        """Warn of a server that says that it is paused, which somebody else has done.

        The first answer does not count: it may be of an update of weights by this run.
        """
        if path != PAUSED:
            return
        is_paused = content["is_paused"]
        member.num_paused = member.num_paused + 1 if is_paused else 0
        if member.num_paused == 2:
            logger.warning(
                "The rollout server %s was paused from outside of this run: its %d samples wait "
                "until somebody resumes it (POST %s/resume)",
                member.server.url,
                len(member.running),
                member.server.url,
            )

    def _ask_whether_there(self, member: Member, now: float) -> None:
        for path, limit_s in PROBES:
            try:
                exchange = member.server.ask(path, method="GET", timeout_s=limit_s)
            except ServerLost as loss:
                self.lose(member, str(loss))
                return
            member.probes[exchange] = (now, limit_s)
            self._selector.register(exchange, EVENT_READ, member)
