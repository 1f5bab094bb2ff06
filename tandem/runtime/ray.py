# SPDX-License-Identifier: Apache-2.0
"""The runtime for many processes, on Ray: one actor a device, at the places that were planned.

The only file that imports ray, and only when a run needs it. Which cluster is decided in
``cluster``, what an actor does in ``hosted``, how calls are waited for in ``waiting``. No call is
retried and no actor restarted: the first failure ends the run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tandem.errors import UserError
from tandem.runtime.cluster import ClusterPlan, OwnDevices
from tandem.runtime.die_with_parent import die_with_parent
from tandem.runtime.failure import (
    Kind,
    ReportedError,
    Symptom,
    WorkerName,
    cause_of_death,
    symptom_of,
)
from tandem.runtime.liveness import Limits, Liveness
from tandem.runtime.placement import require_distinct, seats_of
from tandem.runtime.probe_devices import own_devices
from tandem.runtime.ray_cluster import Reservation, interruptible, reserve, start_ray
from tandem.runtime.ray_env import ray_environment
from tandem.runtime.waiting import Call, Waits, Worker
from tandem.runtime.worker_process import Build, HostedObject, Opened, Reply, Seat

if TYPE_CHECKING:
    from tandem.platforms.record import Platform
    from tandem.runtime.rendezvous import Meeting

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_LAST_LINES = 20


class _Actor(HostedObject):
    """The class of Ray's actors. Ray runs its methods one at a time, but for ``watch`` and
    ``sign``."""

    def take_seat(self, seat: Seat) -> Opened:
        """Isolate this process by what Ray assigned to it."""
        import ray

        die_with_parent()  # Ray tells those that can listen to end; a stopped process cannot
        context = ray.get_runtime_context()
        assigned = context.get_accelerator_ids().get(seat.visibility.resource, [])
        return replace(self.open(seat, assigned), actor=context.get_actor_id())

    def watch(self) -> None:
        """Never returns: its failure tells that the process has ended."""
        threading.Event().wait()


@dataclass(frozen=True, slots=True)
class _Member:
    """A worker and the handle by which it is called."""

    worker: Worker
    actor: Any

    def ask(self) -> Any:
        """For a sign of life."""
        return self.actor.sign.options(concurrency_group="watch").remote()


class RayRuntime:
    """Implements ``tandem.api.Runtime``, and starts pools of workers.

    A context manager, so that the processes end with it whatever happens. To be opened on the main
    thread: Ray's processes are told to end with the thread that started them.

    Attributes:
        address: the IP address of the driver's node, by which workers reach it.
        opened: what the processes of each pool told of themselves, by rank.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        *,
        platform: Platform,
        pools: Mapping[str, Sequence[int]],
        platforms: Mapping[str, Platform] | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """Find or start the cluster and the workers' processes, each isolated to its device.
        SIGINT and SIGTERM end the wait, also where an event loop runs.

        Args:
            platform: of pools that ``platforms`` does not name.
            pools: per pool the number of the planned node of each rank.
            meeting: where a head's members wait.

        Raises:
            UserError: the cluster cannot be reached, or has too few devices or nodes.
        """
        self._platforms = dict.fromkeys(pools, platform) | dict(platforms or {})
        self._waits = Waits(_finished, self._result)
        self._liveness = Liveness(
            self._waits,
            finished=_finished,
            result=self._result,
            limits=Limits(plan.settings.timeout_s),
        )
        self._actors: list[Any] = []
        self._members: dict[str, list[_Member]] = {}
        self._threads: dict[int, tuple[object, ThreadPoolExecutor]] = {}
        self._shown: set[tuple[str, str]] = set()
        self._logs: dict[str, str] = {}
        self._closing = threading.Lock()
        self._is_open = True
        ray = _load_ray(plan)
        assert not ray.is_initialized(), "a process has one runtime on Ray at a time"
        assert threading.current_thread() is threading.main_thread(), "see the class"
        try:
            with interruptible():
                start_ray(ray, plan, devices=lambda: _devices(plan, self._platforms.values()))
                self.address: str = ray.util.get_node_ip_address()
                if meeting is not None:
                    meeting.announce(ray.get_runtime_context().gcs_address)
                reserved = reserve(
                    ray, plan, pools=pools, platforms=self._platforms, meeting=meeting
                )
                seats = seats_of(pools, reserved, platforms=self._platforms)
                self.opened = self._open(seats, reserved, timeout_s=plan.settings.wait_s)
            members = [member for pool in self._members.values() for member in pool]
            self._liveness.start({member.worker: member.ask for member in members})
        except BaseException:
            self.shutdown()
            raise

    def start_pools(self, builds: Mapping[str, Build]) -> dict[str, RayWorkerGroup]:
        """Make the object of every worker of these pools, all at the same time, once each has
        confirmed that it has a device of its own. Blocks.

        Args:
            builds: per pool a picklable callable from ``WorkerPlace`` to the object.

        Raises:
            WorkerFailure, UserError: the first cause, if one of them failed.
        """
        uuids = self._call_all("confirm", {pool: self._platforms[pool] for pool in builds})
        opened = [one for pool in builds for one in self.opened[pool]]
        require_distinct(opened, uuids, platforms=self._platforms)
        self._call_all("build", builds)
        return {pool: RayWorkerGroup(self._waits, self._members[pool]) for pool in builds}

    def _call_all(self, method: str, arguments: Mapping[str, object]) -> list[Any]:
        """Of all members of these pools, with the pickled argument of their pool; the results in
        their order. Blocks."""
        from ray.cloudpickle import cloudpickle

        calls = []
        for pool, argument in arguments.items():
            payload = cloudpickle.dumps(argument)
            for member in self._members[pool]:
                reference = getattr(member.actor, method).remote(payload)
                calls.append(self._waits.started(member.worker, method, reference=reference))
        return self._waits.gather(calls)

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``function`` on a thread. Methods of one object run in the order of the calls, those
        of different objects at the same time."""
        owner = getattr(function, "__self__", None)
        if id(owner) not in self._threads:
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="facade")
            self._threads[id(owner)] = (owner, executor)
        _, executor = self._threads[id(owner)]
        bound = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(executor, bound)

    async def watch(self) -> None:
        """Raise WorkerFailure as soon as a worker has ended or hangs, also one that nobody waits
        for."""
        await asyncio.to_thread(self._waits.until_death)

    async def close(self) -> None:
        """End all processes; idempotent. Calls in progress end with an error."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """``close`` for callers that are not asynchronous."""
        import ray
        from ray.exceptions import RayError

        with self._closing:
            if not self._is_open:
                return
            self._is_open = False
            self._waits.close()
            self._liveness.close()
            for actor in self._actors if ray.is_initialized() else ():
                with suppress(RayError):
                    ray.kill(actor)
            for _, executor in self._threads.values():
                executor.shutdown(wait=True, cancel_futures=True)
            self._waits.until_left()  # whoever asks Ray after its end starts it again
            ray.shutdown()

    def __enter__(self) -> RayRuntime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _open(
        self, seats: Sequence[Seat], reserved: Mapping[int, Reservation], *, timeout_s: float
    ) -> dict[str, list[Opened]]:
        """One actor a seat, isolated to its device. Fills ``_actors`` and ``_members``."""
        waits = Waits(_finished, self._result)
        calls = []
        for seat in seats:
            place = seat.place
            actor = _make_actor(reserved[place.node], seat.visibility.resource)
            self._actors.append(actor)
            name = WorkerName(place.pool, place.rank, host=place.node_address, pid=0)
            worker = Worker(name, actor.watch.options(concurrency_group="watch").remote())
            waits.watch(worker)
            calls.append(waits.started(worker, "start", reference=actor.take_seat.remote(seat)))
        try:
            told: list[Opened] = waits.gather(calls, timeout_s=timeout_s)
        except TimeoutError as error:
            raise UserError(
                f"trainer.ray_wait_register_center_timeout={timeout_s:g}: not all of the "
                f"{len(seats)} worker processes have started in this time. Raise it."
            ) from error
        opened: dict[str, list[Opened]] = defaultdict(list)
        for call, actor, one in zip(calls, self._actors, told, strict=True):
            name = replace(call.worker.name, host=one.host, pid=one.pid)
            worker = Worker(name, call.worker.watch)
            self._waits.watch(worker)
            self._members.setdefault(name.pool, []).append(_Member(worker, actor))
            opened[name.pool].append(one)
            self._logs[one.actor] = one.log
            logger.debug("%s: %s", name, one.isolation)
        return opened

    def _result(self, reference: Any) -> Any:
        """See ``Waits``. Warnings of workers are logged here, once if many workers say the same."""
        result = _fetch(reference, self._logs)
        if not isinstance(result, Reply):
            return result
        for notice in result.notices:
            if (notice.logger, notice.text) not in self._shown:
                self._shown.add((notice.logger, notice.text))
                text = f"{notice.text} ({notice.source})"
                logging.getLogger(notice.logger).log(notice.level, "%s", text)
        return result.value


class RayWorkerGroup:
    """Implements ``tandem.api.WorkerGroup``."""

    def __init__(self, waits: Waits, members: Sequence[_Member]) -> None:
        self._waits = waits
        self._members = members

    @property
    def size(self) -> int:
        return len(self._members)

    def submit(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Call:
        member = self._members[rank]
        reference = member.actor.call.remote(method, *args, **kwargs)
        return self._waits.started(member.worker, method, reference=reference)

    def gather(self, calls: Sequence[Call]) -> list[Any]:
        return self._waits.gather(calls)

    def first(self, calls: Sequence[Call]) -> int:
        return self._waits.first(calls)


def _devices(plan: ClusterPlan, platforms: Collection[Platform]) -> Sequence[OwnDevices]:
    return own_devices(platforms) if plan.devices is None else plan.devices


def _load_ray(plan: ClusterPlan) -> ModuleType:
    """Ray, silent. Raises UserError if it is not installed."""
    for name, value in ray_environment(plan.role).items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        settings = plan.settings
        raise UserError(
            f"trainer.n_gpus_per_node={settings.devices_per_node}, trainer.nnodes="
            f"{settings.num_nodes}: a run of several processes needs Ray ({error}). Install it by "
            "`pip install 'tandem[cluster]'`, or set both to 1."
        ) from error
    return ray


def _make_actor(reservation: Reservation, resource: str) -> Any:
    """An actor on one of the reserved devices; its process is being started."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    devices: dict[str, Any] = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
    options: dict[str, Any] = {
        "num_cpus": 1,
        **({} if resource == "CPU" else devices),
        "max_restarts": 0,
        "max_task_retries": 0,
        "concurrency_groups": {"watch": 2},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            reservation.group, placement_group_bundle_index=reservation.index
        ),
    }
    return ray.remote(**options)(_Actor).remote()


def _finished(references: Sequence[Any], timeout_s: float) -> list[Any]:
    """See ``Waits``."""
    import ray

    ready, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s)
    if ready and len(references) > 1:
        ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
    return ready


def _fetch(reference: Any, logs: Mapping[str, str]) -> Any:
    """The result of a finished call. Raises ReportedError, whatever happened."""
    import ray
    from ray import exceptions

    now = time.time()
    try:
        return ray.get(reference)
    except exceptions.RayTaskError as error:
        cause = error.cause
        symptom = (
            cause.symptom if isinstance(cause, ReportedError) else symptom_of(cause, time_s=now)
        )
    except exceptions.ActorUnavailableError as error:
        symptom = Symptom(Kind.LOST_PEER, "it cannot be reached", str(error), now)
    except exceptions.RayActorError as error:
        last_words = _last_lines(logs.get(error.actor_id, ""))
        symptom = Symptom(Kind.DIED, cause_of_death(str(error)), last_words, now)
    except (exceptions.OutOfMemoryError, exceptions.NodeDiedError) as error:
        symptom = Symptom(Kind.DIED, cause_of_death(str(error)), "", now)
    except exceptions.RayError as error:
        symptom = Symptom(Kind.LOST_PEER, cause_of_death(str(error)), "", now)
    raise ReportedError(symptom)


def _last_lines(path: str) -> str:
    """Of a log, if it is on this node; without Ray's marks, which begin with a colon."""
    if not path or not Path(path).is_file():
        return ""
    lines = Path(path).read_text("utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines[-_LAST_LINES:] if not line.startswith(":"))
