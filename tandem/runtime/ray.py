# SPDX-License-Identifier: Apache-2.0
"""The runtime for many processes, on Ray: one actor per device, on the nodes that were planned.

This is the only file that imports ray, and it does so only when a run needs it. ``cluster`` decides
which cluster is used, ``worker_process`` has the code of an actor, and ``waiting`` the waits for
calls. No call is retried, and Ray restarts no actor: the first failure ends the run, unless the
pool's workers can be replaced.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tandem.errors import UserError
from tandem.runtime.cluster import ClusterPlan, NodeDevices
from tandem.runtime.failure import (
    Kind,
    ReportedError,
    Symptom,
    WorkerName,
    cause_of_death,
    symptom_of,
)
from tandem.runtime.liveness import Limits, Liveness
from tandem.runtime.os_settings import die_at_once, die_with_parent
from tandem.runtime.probe_devices import find_devices
from tandem.runtime.ray_cluster import (
    Reservation,
    assign_workers,
    interruptible,
    require_distinct,
    reserve,
    start_ray,
)
from tandem.runtime.ray_node import RayNode, driver_environment
from tandem.runtime.token import added, own_token, token_environment
from tandem.runtime.waiting import Call, Waits, Worker
from tandem.runtime.worker_process import (
    Build,
    Reply,
    WorkerAssignment,
    WorkerInfo,
    WorkerProcess,
)

if TYPE_CHECKING:
    from tandem.platforms.record import Platform
    from tandem.runtime.nodes import HeadServer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_LAST_LINES = 20


class _Actor(WorkerProcess):
    """The class of Ray's actors.

    Ray runs its methods one at a time, except ``watch`` and ``heartbeat``.
    """

    def start(self, assignment: WorkerAssignment) -> WorkerInfo:
        """Isolate this process to the devices that Ray assigned to it."""
        import ray

        die_with_parent()  # a suspended process would not react to Ray's request to end
        die_at_once()
        context = ray.get_runtime_context()
        assigned = context.get_accelerator_ids().get(assignment.visibility.resource, [])
        return replace(self.isolate(assignment, assigned), actor=context.get_actor_id())

    def watch(self) -> None:
        """Wait forever. The call fails when the process ends."""
        threading.Event().wait()


@dataclass(frozen=True, slots=True)
class _Handle:
    """A running worker, and what it was started with.

    Attributes:
        starting: the calls that build a worker in place of a lost one, until they are known to have
            ended.
    """

    worker: Worker
    actor: Any
    assignment: WorkerAssignment
    reservation: Reservation
    starting: Sequence[Call] = ()

    def request_heartbeat(self) -> Any:
        """Return the reference of a heartbeat."""
        return self.actor.heartbeat.options(concurrency_group="watch").remote()


class RayRuntime:
    """An implementation of ``tandem.api.Runtime`` that also starts pools of workers.

    It is a context manager, which ends the processes in any case. The thread that opens it must
    live until it is closed, because Ray's processes end with the thread that started them.

    Attributes:
        address: the IP address at which workers reach the driver's node.
        workers: the processes of each pool, by rank.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        *,
        platform: Platform,
        pools: Mapping[str, Sequence[int]],
        platforms: Mapping[str, Platform] | None = None,
        head: HeadServer | None = None,
    ) -> None:
        """Find or start the cluster, and start the workers, each isolated to its device.

        SIGINT and SIGTERM end the wait of the main thread, even if an event loop is running.

        Args:
            platform: the platform of pools that ``platforms`` does not name.
            pools: the planned node number of each rank, by pool.
            head: the server to which the members of this run connect.

        Raises:
            UserError: the cluster cannot be reached, or has too few devices or nodes.
        """
        self._platforms = dict.fromkeys(pools, platform) | dict(platforms or {})
        self._waits = Waits(_finished, self._result, node_end=self._node_end, kill=self._kill)
        self._wait_s = plan.settings.wait_s
        self._liveness = Liveness(
            self._waits,
            finished=_finished,
            result=self._result,
            limits=Limits(plan.settings.timeout_s),
        )
        self._actors: list[Any] = []
        self._handles: dict[str, list[_Handle]] = {}
        self._payloads: dict[str, bytes] = {}
        self._threads: dict[int, tuple[object, ThreadPoolExecutor]] = {}
        self._shown: set[tuple[str, str]] = set()
        self._logs: dict[str, str] = {}
        self._closing = threading.Lock()
        self._is_open = True
        self._node: RayNode | None = None
        self._head = head
        token = head.token if head else own_token(os.environ)
        own = {} if plan.role == "existing" else token_environment(token, os.environ)
        ray = _load_ray(plan, own)
        assert not ray.is_initialized(), "a process has one runtime on Ray at a time"
        try:
            with interruptible(), added(own, os.environ):
                devices = functools.partial(_find_devices, plan, self._platforms.values())
                self._node = start_ray(ray, plan, devices=devices, token=token)
                self.address: str = ray.util.get_node_ip_address()
                self.workers = self._reserve_and_start(plan, pools)
            handles = [handle for pool in self._handles.values() for handle in pool]
            self._liveness.start({handle.worker: handle.request_heartbeat for handle in handles})
        except BaseException:
            self.shutdown()
            raise

    def _reserve_and_start(
        self, plan: ClusterPlan, pools: Mapping[str, Sequence[int]]
    ) -> dict[str, list[WorkerInfo]]:
        """Wait for the nodes of the run, and start the workers on their devices."""
        import ray

        head = self._head
        if head is not None:
            head.announce(ray.get_runtime_context().gcs_address)
        reserved = reserve(
            ray,
            plan,
            pools=pools,
            platforms=self._platforms,
            absent_ranks=head.absent if head else list,
        )
        return self._start(assign_workers(pools, reserved, platforms=self._platforms), reserved)

    def start_pools(
        self, builds: Mapping[str, Build], *, replaceable: Collection[str] = ()
    ) -> dict[str, RayWorkerGroup]:
        """Build the object of every worker of these pools concurrently, and wait for all.

        Before that, each worker confirms that no other worker uses its device.

        Args:
            builds: by pool, a picklable callable from ``WorkerPlace`` to the object.
            replaceable: the pools whose workers can be started again.

        Raises:
            WorkerFailure, UserError: the first cause, if one of them failed.
        """
        uuids = self._call_all("confirm", {pool: self._platforms[pool] for pool in builds})
        infos = [info for pool in builds for info in self.workers[pool]]
        require_distinct(infos, uuids, platforms=self._platforms)
        self._call_all("build", builds)
        for handle in (handle for pool in replaceable for handle in self._handles[pool]):
            self._waits.allow_end(handle.worker)
        return {pool: RayWorkerGroup(self, pool) for pool in builds}

    def start_again(self, pool: str, rank: int) -> None:
        """Start a process in place of a lost worker, in the same place; see ``api.WorkerGroup``."""
        lost = self._handles[pool][rank]
        self._liveness.forget(lost.worker)
        self._waits.forget(lost.worker)
        worker, actor = self._make_worker(lost.assignment, lost.reservation)
        self._waits.allow_end(worker)
        started = [("start", lost.assignment), ("confirm", None), ("build", None)]
        calls = []
        for method, argument in started:
            given = self._payloads[f"{method} {pool}"] if argument is None else argument
            reference = getattr(actor, method).remote(given)
            calls.append(self._waits.started(worker, method, reference=reference))
        self._handles[pool][rank] = replace(lost, worker=worker, actor=actor, starting=calls)

    def until_started(self, pool: str, rank: int) -> None:
        """Wait until a worker that was started again can be called; see ``api.WorkerGroup``."""
        handle = self._handles[pool][rank]
        if not handle.starting:
            return
        info: WorkerInfo
        try:
            info, _, _ = self._waits.gather(handle.starting, timeout_s=self._wait_s)
        except TimeoutError as error:
            raise self._late(1) from error
        self._waits.forget(handle.worker)
        named = self._named(handle, info)
        self._waits.allow_end(named.worker)
        self._handles[pool][rank] = named
        self.workers[pool][rank] = info
        self._liveness.watch(named.worker, named.request_heartbeat)

    def _call_all(self, method: str, arguments: Mapping[str, object]) -> list[Any]:
        """Call all workers of these pools with the pickled argument of their pool, and wait."""
        from ray.cloudpickle import cloudpickle

        calls = []
        for pool, argument in arguments.items():
            payload = self._payloads[f"{method} {pool}"] = cloudpickle.dumps(argument)
            for handle in self._handles[pool]:
                reference = getattr(handle.actor, method).remote(payload)
                calls.append(self._waits.started(handle.worker, method, reference=reference))
        return self._waits.gather(calls)

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``function`` on a thread.

        Methods of one object run in the order of the calls, methods of different objects at the
        same time.
        """
        owner = getattr(function, "__self__", None)
        if id(owner) not in self._threads:
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="facade")
            self._threads[id(owner)] = (owner, executor)
        _, executor = self._threads[id(owner)]
        bound = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(executor, bound)

    async def watch(self) -> None:
        """Raise WorkerFailure as soon as any worker has ended or hangs."""
        await asyncio.to_thread(self._waits.until_death)

    async def close(self) -> None:
        """End all processes; idempotent. Calls in progress end with an error."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End all processes. The synchronous form of ``close``."""
        import ray
        from ray.exceptions import RayError

        with self._closing:
            if not self._is_open:
                return
            self._is_open = False
            self._waits.close()
            self._liveness.close()
            has_ended = self._node is not None and self._node.describe_end() != ""
            for actor in self._actors if ray.is_initialized() and not has_ended else ():
                with suppress(RayError):
                    ray.kill(actor)
            for _, executor in self._threads.values():
                executor.shutdown(wait=True, cancel_futures=True)
            self._waits.until_left()  # a call of Ray after its shutdown would start it again
            ray.shutdown()
            if self._node is not None:
                self._node.close()

    def __enter__(self) -> RayRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _start(
        self,
        assignments: Sequence[WorkerAssignment],
        reserved: Mapping[int, Reservation],
    ) -> dict[str, list[WorkerInfo]]:
        """Start an actor per assignment, isolated to its device, and fill in the handles."""
        waits = Waits(_finished, self._result)
        handles, calls = [], []
        for assignment in assignments:
            reservation = reserved[assignment.place.node]
            worker, actor = self._make_worker(assignment, reservation)
            waits.watch(worker)
            handles.append(_Handle(worker, actor, assignment, reservation))
            calls.append(waits.started(worker, "start", reference=actor.start.remote(assignment)))
        try:
            infos: list[WorkerInfo] = waits.gather(calls, timeout_s=self._wait_s)
        except TimeoutError as error:
            raise self._late(len(assignments)) from error
        workers: dict[str, list[WorkerInfo]] = defaultdict(list)
        for handle, info in zip(handles, infos, strict=True):
            named = self._named(handle, info)
            self._waits.watch(named.worker)
            self._handles.setdefault(info.place.pool, []).append(named)
            workers[info.place.pool].append(info)
        return workers

    def _make_worker(
        self, assignment: WorkerAssignment, reservation: Reservation
    ) -> tuple[Worker, Any]:
        """Start an actor, and return it with its worker, whose process is not known yet."""
        actor = _make_actor(reservation, assignment.visibility.resource)
        self._actors.append(actor)
        place = assignment.place
        name = WorkerName(place.pool, place.rank, host=place.node_address, pid=0)
        return Worker(name, actor.watch.options(concurrency_group="watch").remote()), actor

    def _named(self, handle: _Handle, info: WorkerInfo) -> _Handle:
        """Return the handle of a worker that has started, whose process is known."""
        name = replace(handle.worker.name, host=info.host, pid=info.pid)
        self._logs[info.actor] = info.log
        logger.debug("%s: %s", name, info.isolation)
        return replace(handle, worker=Worker(name, handle.worker.watch), starting=())

    def _late(self, number: int) -> UserError:
        return UserError(
            "trainer.ray_wait_register_center_timeout",
            self._wait_s,
            rule=f"not all of the {number} worker processes have started in this time",
            remedy="Raise it.",
        )

    def _kill(self, worker: Worker) -> None:
        """End the process of a worker that hangs; see ``Waits``."""
        import ray

        handle = self._handles[worker.name.pool][worker.name.rank]
        address = handle.assignment.place.node_address
        # Machines may have the same name, and the process number means another process there.
        if (worker.name.host, address) == (socket.gethostname(), self.address):
            # A suspended process does not react to Ray's request to end.
            with suppress(ProcessLookupError):
                os.kill(worker.name.pid, signal.SIGKILL)
        else:
            ray.kill(handle.actor)

    def _node_end(self) -> str:
        """Return how Ray ended on this node, or which node was lost, else ""; see ``Waits``."""
        end = self._node.describe_end() if self._node is not None and self._is_open else ""
        if end:
            return f"Ray ended on the driver's node: {end}"
        return self._head.lost() if self._head is not None else ""

    def _result(self, reference: Any) -> Any:
        """Return the result of a finished call; see ``Waits``.

        Warnings of workers are logged here; equal ones are logged once.
        """
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
    """An implementation of ``tandem.api.WorkerGroup``."""

    def __init__(self, runtime: RayRuntime, pool: str) -> None:
        self._runtime, self._pool = runtime, pool
        self._waits = runtime._waits
        self._handles = runtime._handles[pool]

    @property
    def size(self) -> int:
        return len(self._handles)

    def submit(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Call:
        handle = self._handles[rank]
        reference = handle.actor.call.remote(method, *args, **kwargs)
        return self._waits.started(handle.worker, method, reference=reference)

    def gather(self, calls: Sequence[Call]) -> list[Any]:
        return self._waits.gather(calls)

    def first(self, calls: Sequence[Call]) -> int:
        return self._waits.first(calls)

    def start_again(self, rank: int) -> None:
        self._runtime.start_again(self._pool, rank)

    def until_started(self, rank: int) -> None:
        self._runtime.until_started(self._pool, rank)


def _find_devices(plan: ClusterPlan, platforms: Collection[Platform]) -> Sequence[NodeDevices]:
    return find_devices(platforms) if plan.devices is None else plan.devices


def _load_ray(plan: ClusterPlan, own: Mapping[str, str]) -> ModuleType:
    """Import Ray, silenced. Raise UserError if it is missing.

    Args:
        own: the variables of the token of the cluster.
    """
    for name, value in driver_environment(plan.role).items():
        os.environ.setdefault(name, value)
    try:
        with added(own, os.environ):
            import ray
            from ray import _raylet

            # Ray keeps the mode and the token of the first cluster of a process. This is how its
            # own tests make it read them again. A cluster with other ones would not answer.
            _raylet.AuthenticationTokenLoader.instance().reset_cache()  # pyright: ignore[reportAttributeAccessIssue]
            _raylet.Config.initialize("")  # pyright: ignore[reportAttributeAccessIssue]
    except ModuleNotFoundError as error:
        raise UserError(
            plan.settings.sizes_key,
            plan.settings.num_nodes,
            rule=f"a run of several processes needs Ray ({error})",
            remedy="Run `pip install '.[cluster]'` in a checkout of tandem, or set both to 1.",
        ) from error
    return ray


def _make_actor(reservation: Reservation, resource: str) -> Any:
    """Start an actor on one of the reserved devices, without waiting for its process."""
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
    """Wait for calls; see ``Waits``."""
    import ray

    ready, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s)
    if ready and len(references) > 1:
        ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
    return ready


def _fetch(reference: Any, logs: Mapping[str, str]) -> Any:
    """Return the result of a finished call. Raise ReportedError for every failure."""
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
        end_of_log = _last_lines(logs.get(error.actor_id, ""))
        symptom = Symptom(Kind.DIED, cause_of_death(str(error), end_of_log), end_of_log, now)
    except (exceptions.OutOfMemoryError, exceptions.NodeDiedError) as error:
        symptom = Symptom(Kind.DIED, cause_of_death(str(error)), "", now)
    except exceptions.RayError as error:
        symptom = Symptom(Kind.LOST_PEER, cause_of_death(str(error)), "", now)
    raise ReportedError(symptom)


def _last_lines(path: str) -> str:
    """Return the end of a log if it is on this node, without Ray's markers (lines with ":")."""
    if not path or not Path(path).is_file():
        return ""
    lines = Path(path).read_text("utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines[-_LAST_LINES:] if not line.startswith(":"))
