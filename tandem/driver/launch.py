# SPDX-License-Identifier: Apache-2.0
"""Start of a run's processes: this one on one device, else one Ray process per device."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tandem.api import EngineFailure, Runtime, WorkerGroup
from tandem.comm.store import host_store, share_port
from tandem.config.check.device_rules import (
    mcore_key,
    require_division,
    require_whole_layers,
)
from tandem.config.check.expert_rules import require_own_routers
from tandem.config.check.mcore_rules import require_megatron_core
from tandem.config.check.platform_rules import platform_key
from tandem.config.check.read_conditions import ONE_PROCESS
from tandem.config.derived.pools import Placement
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import TrainedModel, place, trained_model
from tandem.config.plan.memory import GIB, plan_memory
from tandem.config.plan.memory_choice import choose_memory
from tandem.config.plan.memory_remedy import (
    narrow_cache,
    require_cache,
    require_host_memory,
    require_memory,
)
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.trainer import TrainerConfig
from tandem.driver.arguments import with_found
from tandem.driver.execution import first_cause
from tandem.driver.run_folder import name_unwritable
from tandem.errors import RunFailure, UserError
from tandem.models.folder import ModelFolder
from tandem.platforms.host_memory import host_memory_bytes
from tandem.platforms.record import Platform
from tandem.platforms.registry import platform_named
from tandem.platforms.select import AUTO, select_platform
from tandem.rollout.factory import (
    require_decoder,
    require_devices,
    require_divided_experts,
    require_kernels,
    require_quantization,
    require_recording,
)
from tandem.runtime.cluster import ClusterPlan, ClusterSettings, NodeDevices, plan_cluster
from tandem.runtime.failure import NodeFailure, WorkerFailure
from tandem.runtime.inprocess import InProcessRuntime
from tandem.runtime.nodes import HeadServer, run_on_nodes
from tandem.runtime.probe_devices import find_devices
from tandem.runtime.ray import RayRuntime
from tandem.runtime.resources import fits, marker_of, node_needs, refusal, this_machine
from tandem.runtime.token import token_file
from tandem.runtime.torchrun import launched_node
from tandem.types import TokenIds
from tandem.workers.calls import call_at_start
from tandem.workers.deployment import pool_jobs, replaceable_pools
from tandem.workers.job import build_worker
from tandem.workers.policies import compute_dtype, require_precision

logger = logging.getLogger(__name__)

PLACEMENT_FILE = "placement.json"


@dataclass(frozen=True, slots=True)
class RunSite:
    """The pools of a run, their platforms and the cluster, before anything is started.

    Attributes:
        platforms: the platform of each used pool.
        cluster: None if one process does everything.
        head: the server to which the other nodes connect, if the run forms its own cluster.
        chosen: the memory keys that the run has set itself, which ``config`` has.
    """

    config: RunConfig | SftConfig
    platforms: Mapping[str, Platform]
    placement: Placement
    cluster: ClusterPlan | None
    head: HeadServer | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> TrainedModel:
        """The model that the run trains."""
        return trained_model(self.config)

    @property
    def platform(self) -> Platform:
        """The platform of the pool that trains."""
        return self.platforms[self.placement.pool_of("actor-train").name]

    @property
    def is_mixed(self) -> bool:
        """Whether the pools have several platforms, whose devices may be on other machines."""
        return len({platform.name for platform in self.platforms.values()}) > 1

    @property
    def nodes(self) -> Mapping[str, list[int]]:
        """The planned node number of each rank, by pool."""
        place = self.placement
        return {
            pool.name: [device.node for device in place.devices_of(pool)]
            for pool in place.used_pools
        }

    @property
    def num_devices(self) -> int:
        """The number of devices in used pools."""
        return sum(pool.num_devices for pool in self.placement.used_pools)


def run_on_site(
    config: RunConfig | SftConfig,
    body: Callable[[RunSite], int],
    *,
    will_restart: Callable[[], bool] = lambda: False,
) -> int:
    """Run ``body`` on the node that drives the run; other nodes add their devices until it ends.

    Args:
        will_restart: whether a failure at this moment will be followed by another start.

    Returns:
        the exit code, the same on all nodes.

    Raises:
        UserError: the nodes do not find each other, or lack devices that the run needs.
        RunFailure: a process or a node of the run failed.
    """
    site = planned_site(config)
    cluster = site.cluster
    if cluster is None:
        if os.environ.get("RAY_ADDRESS"):
            logger.warning("without effect: RAY_ADDRESS: %s", ONE_PROCESS)
        try:
            return body(site)
        except EngineFailure as failure:
            raise RunFailure(str(failure)) from None
    if cluster.role != "existing":
        _warn_of_few_cores(site, cluster.node_rank)
    try:
        return run_on_nodes(
            cluster,
            lambda head: body(replace(site, head=head)),
            platforms=tuple(site.platforms.values()),
            token_file=token_file(config.trainer.run_folder),
            will_restart=will_restart,
        )
    except WorkerFailure as failure:
        raise RunFailure(str(failure)) from None
    except NodeFailure as failure:
        raise RunFailure(str(failure), restarts_elsewhere=failure.restarts_elsewhere) from None


def planned_site(config: RunConfig | SftConfig) -> RunSite:
    """Return the site of a run with the plan of its cluster; start nothing.

    Raises:
        UserError: a platform cannot be used here, or this machine cannot hold the run.
    """
    site = local_site(config)
    if site.placement.is_one_process and config.trainer.nnodes == 1:
        return site
    return replace(site, cluster=_plan_cluster(site))


def _plan_cluster(site: RunSite) -> ClusterPlan:
    """Return the plan of the run's cluster. Raise UserError if this machine cannot hold it."""
    trainer = site.config.trainer
    settings = ClusterSettings(
        num_nodes=trainer.nnodes,
        devices_per_node=trainer.n_gpus_per_node,
        wait_s=trainer.ray_wait_register_center_timeout,
        timeout_s=site.model.timeout_s,
        restarts=trainer.max_restarts > 0,
        ray_init=site.config.ray_kwargs.ray_init,
    )
    cluster = _cluster_of_launch(settings)
    needs = node_needs(site.nodes, site.platforms, marked=site.is_mixed)
    if cluster.role != "local":
        return cluster
    devices = tuple(find_devices(site.platforms.values())) if site.is_mixed else _own_devices(site)
    cores = max(os.cpu_count() or 1, settings.devices_per_node)
    machine = this_machine(devices, num_cores=cores)
    if not fits([needs[0]], [machine.resources]):
        raise refusal(needs, [machine], platforms=site.platforms, settings=settings)
    return replace(cluster, devices=devices) if site.is_mixed else cluster


def _own_devices(site: RunSite) -> tuple[NodeDevices, ...]:
    """Return the devices that this process sees, if all pools have one platform."""
    platform = site.platform
    if platform.visibility.mode == "none":
        return ()
    number = platform.num_devices()
    return (NodeDevices(platform.visibility, number, marker=marker_of(platform)),)


def _cluster_of_launch(settings: ClusterSettings) -> ClusterPlan:
    """Return the role of this process, which torchrun's options define on several nodes."""
    node = launched_node(os.environ)
    if node is None or node.num_nodes == 1:
        return plan_cluster(settings, os.environ)
    environment = {**os.environ, "NODE_RANK": str(node.node_rank)}
    if node.has_store:
        port = share_port(
            node.master_addr,
            node.master_port,
            key=f"tandem/port/{node.restarts}",
            is_first=node.node_rank == 0,
            timeout_s=settings.wait_s,
        )
        environment["MASTER_PORT"] = str(port)
    cluster = plan_cluster(settings, environment)
    if cluster.role == "existing":
        raise UserError(
            cluster.source,
            cluster.address,
            rule=f"torchrun started the command on {node.num_nodes} nodes, which form a cluster of "
            "their own",
            remedy="Leave it out, or start the command once, without torchrun.",
        )
    return cluster


def _warn_of_few_cores(site: RunSite, node: int) -> None:
    # The run declares one core per process to Ray, however few there are.
    hosts = [name for name, own in site.platforms.items() if own.visibility.mode == "none"]
    num_processes = sum(site.nodes[pool].count(node) for pool in hosts)
    num_cores = os.cpu_count() or 1
    if num_processes > num_cores:
        wanted = f"trainer.n_gpus_per_node={site.config.trainer.n_gpus_per_node}"
        reason = " (no accelerator was found)" if site.config.trainer.device == AUTO else ""
        logger.warning(
            "%s: %d processes share the %d cores of the host%s. One process trains faster here: "
            "trainer.n_gpus_per_node=1.",
            wanted,
            num_processes,
            num_cores,
            reason,
        )


def local_site(config: RunConfig | SftConfig) -> RunSite:
    """Return the site of a run in this process, before a cluster is planned."""
    placement = place(config)
    platforms = _platforms(config, placement)
    _require_wanted_processes(config.trainer, platforms)
    if isinstance(config, RunConfig):
        found = {pool: platform.name for pool, platform in platforms.items()}
        placement = with_found(config, placement, found=found)
    return RunSite(config, platforms, placement, cluster=None)


def _require_wanted_processes(trainer: TrainerConfig, platforms: Mapping[str, Platform]) -> None:
    """Raise UserError if a default, not the user, would start several processes on the host.

    verl's default of ``n_gpus_per_node`` counts accelerators.
    """
    is_set = "n_gpus_per_node" in trainer.model_fields_set
    on_host = any(platform.visibility.mode == "none" for platform in platforms.values())
    if on_host and not is_set and trainer.n_gpus_per_node > 1:
        raise UserError(
            "trainer.n_gpus_per_node",
            trainer.n_gpus_per_node,
            rule="is verl's default for accelerators, and the run is on the host (trainer.device="
            f"{trainer.device}; tandem doctor lists the devices of this machine)",
            remedy="Set trainer.n_gpus_per_node=1, or the number of processes that you want.",
        )


def _platforms(config: RunConfig | SftConfig, placement: Placement) -> dict[str, Platform]:
    """Return the platform of each pool.

    A platform that all pools share must be usable here. Otherwise each worker checks its own.
    """
    found = {
        pool.name: select_platform(AUTO)
        if pool.platform == AUTO
        else platform_named(pool.platform, key=platform_key(pool, config))
        for pool in placement.used_pools
    }
    if len({platform.name for platform in found.values()}) == 1:
        pool = placement.used_pools[0]
        select_platform(pool.platform, key=platform_key(pool, config))
    return found


@contextmanager
def name_step(step: Callable[[], int]) -> Iterator[None]:
    """Raise failures of workers and engines as ``RunFailure``, with the current step."""
    try:
        yield
    except (WorkerFailure, NodeFailure, EngineFailure, BaseExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, (WorkerFailure, NodeFailure, EngineFailure)):
            raise
        number = step()
        raise RunFailure(f"step {number}: {cause}", step=number) from None


def fitted(
    site: RunSite, model: ModelFolder, *, auxiliary: Mapping[str, ModelFolder] | None = None
) -> RunSite:
    """Return the site with the memory keys that a run sets itself.

    The workers, not this function, check memory and precision if pools have several platforms.

    Args:
        auxiliary: the other models, by task.

    Raises:
        UserError: the devices cannot hold or compute the models in their layouts.
    """
    others = auxiliary or {}
    layouts = site.placement.layouts
    known = {task: ModelSizes.of(others.get(task, model).hf_config) for task in layouts}
    require_division(site.config, site.placement, models=known)
    trains = site.platforms[site.placement.pool_of("actor-train").name]
    require_megatron_core(
        mcore_key(site.config, site.placement),
        platform=trains.name,
        runs_megatron=trains.runs_megatron,
        adaptor=trains.megatron_adaptor,
    )
    if model.decoder_config is None:
        require_whole_layers(site.config, site.placement, family=model.hf_config["model_type"])
    if isinstance(site.config, RunConfig):
        _require_generation(site, site.config, model=model)
    if site.is_mixed:
        return site
    for task, own in site.model.of_task.items():
        if task in layouts:
            require_precision(own.layout, site.platform, section=own.section)
    sizes = known["actor-train"]
    if not site.platform.has_own_memory or sizes is None:
        return site
    auxiliary_sizes = {name: own for name in others if (own := known[name]) is not None}
    return _fitted_to_memory(site, model, sizes=sizes, auxiliary=auxiliary_sizes)


def _fitted_to_memory(
    site: RunSite,
    model: ModelFolder,
    *,
    sizes: ModelSizes,
    auxiliary: Mapping[str, ModelSizes],
) -> RunSite:
    """Return the site with the memory keys that a run sets itself. Require that it fits."""
    available_bytes = site.platform.total_memory_bytes()
    is_here = site.config.trainer.nnodes == 1  # the hosts of other nodes may have other memory
    host_bytes = host_memory_bytes() if is_here else None
    recomputes_parts = model.decoder_config is not None
    has_pages = site.platform.kernels == "triton" and recomputes_parts
    by_megatron = mcore_key(site.config, site.placement) is not None
    site = _with_memory_keys(
        site,
        sizes,
        auxiliary=auxiliary,
        available_bytes=available_bytes,
        host_bytes=host_bytes,
        recomputes_parts=recomputes_parts,
        has_own_kernels=has_pages and not by_megatron,
    )
    require_memory(
        site.config,
        sizes,
        auxiliary=auxiliary,
        available_bytes=available_bytes,
        host_bytes=host_bytes,
        recomputes_parts=recomputes_parts,
    )
    if host_bytes is not None:
        require_host_memory(
            site.config,
            sizes,
            auxiliary=auxiliary,
            available_bytes=available_bytes,
            host_bytes=host_bytes,
        )
    if has_pages and isinstance(site.config, RunConfig):
        _check_cache(site.config, sizes, auxiliary=auxiliary, available_bytes=available_bytes)
    return site


def _check_cache(
    config: RunConfig,
    sizes: ModelSizes,
    *,
    auxiliary: Mapping[str, ModelSizes],
    available_bytes: int,
) -> None:
    """Require a cache for the longest sequence, and say if it is one for some sequences only."""
    require_cache(config, sizes, available_bytes=available_bytes)
    if config.actor_rollout_ref.rollout.attaches_servers:
        return  # the cache is that of the servers
    note = narrow_cache(config, sizes, auxiliary=auxiliary, available_bytes=available_bytes)
    if note is not None:
        logger.info("%s", note)


def _require_generation(site: RunSite, config: RunConfig, *, model: ModelFolder) -> None:
    """Raise UserError where the devices that generate cannot compute what the run asks of them."""
    platform = site.platforms[site.placement.pool_of("generate").name]
    rollout, decoder = config.actor_rollout_ref.rollout, model.decoder_config
    require_kernels(decoder, platform, key=f"{site.model.key}={str(model.path)!r}")
    require_decoder(rollout, decoder, model=str(model.path))
    layout = config.actor_rollout_ref.actor.fsdp_config
    require_quantization(rollout, decoder, platform=platform, dtype=compute_dtype(layout, platform))
    require_recording(rollout)
    require_divided_experts(rollout, decoder)
    require_devices(rollout, platform)
    require_own_routers(config, has_decoder=decoder is not None)


def _with_memory_keys(
    site: RunSite,
    sizes: ModelSizes,
    *,
    auxiliary: Mapping[str, ModelSizes],
    available_bytes: int,
    host_bytes: int | None,
    recomputes_parts: bool,
    has_own_kernels: bool,
) -> RunSite:
    """Return the site with the chosen memory keys, and say which they are."""
    config, chosen = choose_memory(
        site.config,
        sizes,
        auxiliary=auxiliary,
        available_bytes=available_bytes,
        host_bytes=host_bytes,
        recomputes_parts=recomputes_parts,
        has_own_kernels=has_own_kernels,
    )
    if not chosen:
        return site
    plans = plan_memory(config, sizes, auxiliary=auxiliary, available_bytes=available_bytes)
    planned = max(plan.total for plan in plans.values())
    logger.info(
        "chosen to fit %.0f GiB (%.0f planned): %s",
        available_bytes / GIB,
        planned / GIB,
        " ".join(f"{key}={value}" for key, value in chosen.items()),
    )
    return replace(site, config=config, chosen=chosen)


@asynccontextmanager
async def start_processes(
    site: RunSite, *, eos_ids: TokenIds, total_steps: int
) -> AsyncIterator[tuple[Runtime, Mapping[str, WorkerGroup] | None]]:
    """Run the processes of a run while the block runs.

    Returns:
        the runtime, and the workers of each pool, which have built their engines. They are None if
        this process does everything; then the caller builds the engines.

    Raises:
        UserError: a model cannot be loaded, or there are too few devices.
        WorkerFailure: a worker process failed.
    """
    if site.cluster is None:
        thread = InProcessRuntime(site.platform.prepare_thread)
        try:
            yield thread, None
        finally:
            await thread.close()
        return
    runtime = RayRuntime(
        site.cluster,
        platforms=site.platforms,
        platform=site.platform,
        pools=site.nodes,
        head=site.head,
    )
    try:
        store = host_store(runtime.address, timeout_s=site.cluster.settings.wait_s)
        jobs = pool_jobs(
            site.config,
            site.placement,
            platforms=site.platforms,
            store=store.place,
            eos_ids=eos_ids,
            total_steps=total_steps,
        )
        groups = await runtime.call(
            runtime.start_pools,
            {name: partial(build_worker, job) for name, job in jobs.items()},
            replaceable=replaceable_pools(site.config, site.placement),
        )
        await runtime.call(_write_placement, site, groups)
        yield runtime, groups
    finally:
        await runtime.close()


def _write_placement(site: RunSite, groups: Mapping[str, WorkerGroup]) -> None:
    """Write where each task's processes run, as they report it.

    Raises:
        UserError: the folder of the run cannot be written.
    """
    records = [
        {"tasks": list(pool.tasks), **record}
        for pool in site.placement.used_pools
        for record in call_at_start([groups[pool.name]], "describe")
    ]
    folder: Path = site.config.trainer.run_folder
    with name_unwritable(folder):
        (folder / PLACEMENT_FILE).write_text(json.dumps(records, indent=2) + "\n")
