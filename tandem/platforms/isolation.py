# SPDX-License-Identifier: Apache-2.0
"""How a worker process is kept to its own device: a plan of environment variables and one index.

Pure, and free of torch: the plan is made from what the scheduler assigned and what the process
inherited, and applied before any vendor library is loaded. It never shows a process more than it
inherited, and refuses what can be read in two ways. Who hands devices out is the scheduler's
business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.errors import UserError

_NAME = re.compile(r"-?\d+|[A-Za-z]+-[\w./-]+")
_NO_DEVICES = "NoDevFiles"
"""What some schedulers write where they give no device."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """How processes of a platform are kept to their devices, and what Ray knows of them.

    Attributes:
        mode: ``none``: there is nothing to isolate. ``mask``: a process is shown its device alone,
            which then has index 0. ``select``: it sees what it inherited and uses its device by
            index.
        resource: Ray's name for such a device.
        is_known_to_ray: whether Ray finds these devices by itself and hands them out by the names
            that stand in the variables; else it counts them from 0.
        variables: environment variables that list visible devices. The plan sets the first; the
            others mean the same and are removed.
        renumbering: one that hides devices so that the indices in ``variables`` shift.
        prefix: what stands before the list in their values.
        ray_switch: set in a process, Ray leaves ``variables`` alone there; "" if there is none.
    """

    mode: Literal["none", "mask", "select"]
    resource: str
    is_known_to_ray: bool = True
    variables: tuple[str, ...] = ()
    renumbering: str = ""
    prefix: str = ""
    ray_switch: str = ""


_NOSET = "RAY_EXPERIMENTAL_NOSET_"

HOST = Visibility(mode="none", resource="CPU")
CUDA_LIKE = Visibility(
    mode="mask",
    resource="GPU",
    variables=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    renumbering="ROCR_VISIBLE_DEVICES",
    ray_switch=_NOSET + "CUDA_VISIBLE_DEVICES",
)
"""NVIDIA's and AMD's devices: torch calls both cuda, and AMD's runtime reads either variable."""
ASCEND = Visibility(
    mode="mask",
    resource="NPU",
    variables=("ASCEND_RT_VISIBLE_DEVICES",),
    ray_switch=_NOSET + "ASCEND_RT_VISIBLE_DEVICES",
)
XPU = Visibility(
    mode="mask",
    resource="GPU",
    variables=("ONEAPI_DEVICE_SELECTOR",),
    prefix="level_zero:",
    ray_switch=_NOSET + "ONEAPI_DEVICE_SELECTOR",
)
MLU = Visibility(
    mode="mask", resource="GPU", is_known_to_ray=False, variables=("MLU_VISIBLE_DEVICES",)
)
MUSA = Visibility(
    mode="select", resource="GPU", is_known_to_ray=False, variables=("MUSA_VISIBLE_DEVICES",)
)
"""Its collectives fail among processes that see one device each, hence ``select``."""


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    """What one process does before it loads anything of a vendor.

    Attributes:
        env_set, env_unset: changes of its environment.
        local_index: of its device among those that it then sees.
        physical_id: the device's name on the node; "" where there is nothing to isolate.
    """

    env_set: tuple[tuple[str, str], ...] = ()
    env_unset: tuple[str, ...] = ()
    local_index: int = 0
    physical_id: str = ""

    def __str__(self) -> str:
        changes = [f"{name}={value}" for name, value in self.env_set]
        changes += [f"no {name}" for name in self.env_unset]
        device = f"device {self.physical_id} as index {self.local_index}"
        return ", ".join([*changes, device]) if self.physical_id else "nothing to isolate"


def plan_isolation(
    visibility: Visibility,
    assigned: Sequence[str],
    *,
    inherited: Mapping[str, str],
    node_visible: Sequence[str] = (),
) -> IsolationPlan:
    """How a process that was assigned a device comes to use that device and no other.

    Args:
        assigned: what the scheduler gave this process: one id.
        inherited: the environment of the process.
        node_visible: all ids that the scheduler hands out on this node, in order; empty if not
            known. Tells whether an id names a device or a position in the inherited list.

    Raises:
        UserError: it does not follow which device is meant.

    Example:
        >>> str(plan_isolation(CUDA_LIKE, ["5"], inherited={"CUDA_VISIBLE_DEVICES": "4,5,6,7"}))
        'CUDA_VISIBLE_DEVICES=5, device 5 as index 0'
    """
    if visibility.mode == "none":
        return IsolationPlan()
    if len(assigned) != 1 or "," in assigned[0]:
        raise UserError(
            f"{visibility.resource}={','.join(assigned)!r}: a worker uses exactly one device. "
            "Let the scheduler assign one to each."
        )
    source, mask = _inherited_mask(visibility, inherited)
    if mask is None:
        physical = _own_name(assigned[0], source=source, node_visible=node_visible)
    else:
        physical = _in_mask(assigned[0], mask, source=source, node_visible=node_visible)
    if visibility.mode == "select":
        return IsolationPlan(
            local_index=_index(physical, mask, source=source), physical_id=physical
        )
    others = (*visibility.variables[1:], visibility.renumbering)
    return IsolationPlan(
        env_set=((visibility.variables[0], visibility.prefix + physical),),
        env_unset=tuple(name for name in others if name in inherited),
        physical_id=physical,
    )


def apply_isolation(plan: IsolationPlan, environment: MutableMapping[str, str]) -> None:
    """Change ``environment`` as planned; children started later inherit it."""
    for name in plan.env_unset:
        environment.pop(name, None)
    environment.update(plan.env_set)


def is_restricted(visibility: Visibility, inherited: Mapping[str, str]) -> bool:
    """Whether an environment lists devices at all; an empty list hides them."""
    return any(name in inherited for name in (*visibility.variables, visibility.renumbering))


def inherited_names(visibility: Visibility, inherited: Mapping[str, str]) -> tuple[str, ...]:
    """The devices that an environment lists as visible; empty if it lists none.

    Raises:
        UserError: it lists them in a form that is not understood, or in two ways.
    """
    return _inherited_mask(visibility, inherited)[1] or ()


def _inherited_mask(
    visibility: Visibility, inherited: Mapping[str, str]
) -> tuple[str, tuple[str, ...] | None]:
    """(name=value of the variable that restricts this process, its list or None)."""
    names = [name for name in visibility.variables if name in inherited]
    shown = ", ".join(f"{name}={inherited[name]}" for name in names)
    if visibility.renumbering in inherited:
        renumbering = f"{visibility.renumbering}={inherited[visibility.renumbering]}"
        if names:
            raise UserError(
                f"{renumbering}, {shown}: indices of the second count within the first. Set one."
            )
        names, shown = [visibility.renumbering], renumbering
    if not names:
        return next(iter(visibility.variables), ""), None
    if len({inherited[name] for name in names}) > 1:
        raise UserError(f"{shown}: both name the visible devices, and differ. Set one of them.")
    return shown, _parse(inherited[names[0]], source=shown, prefix=visibility.prefix)


def _parse(value: str, *, source: str, prefix: str) -> tuple[str, ...]:
    if not value.strip() or value == _NO_DEVICES:
        return ()
    parts = [part.strip() for part in value.removeprefix(prefix).split(",")]
    has_prefix = value.startswith(prefix)
    if not has_prefix or not all(_NAME.fullmatch(part) for part in parts):
        example = f"{prefix}0,1"
        raise UserError(f"{source}: is no list of devices. Write it as {example}.")
    end = next((i for i, part in enumerate(parts) if part.startswith("-")), len(parts))
    if len(set(parts[:end])) < end:
        raise UserError(f"{source}: names a device twice. Name each once.")
    return tuple(parts[:end])  # drivers ignore what follows a negative index


def _own_name(assigned: str, *, source: str, node_visible: Sequence[str]) -> str:
    if node_visible and assigned not in node_visible:
        raise UserError(
            f"{source}: device {assigned} was assigned, but this node has "
            f"{','.join(node_visible)}. Check how the scheduler numbers devices."
        )
    return assigned


def _in_mask(
    assigned: str, mask: tuple[str, ...], *, source: str, node_visible: Sequence[str]
) -> str:
    """The name of the assigned device, which is a name in ``mask`` or a position in it."""
    if not mask:
        raise UserError(f"{source}: hides all devices, but {assigned} was assigned. Unset it.")
    positions = tuple(str(i) for i in range(len(mask)))
    names = set(mask)
    counts = not node_visible or tuple(node_visible) == positions
    shares_names = not node_visible or names <= set(node_visible) or set(node_visible) <= names
    readings = {mask[int(assigned)]} if counts and assigned in positions else set[str]()
    if shares_names and assigned in names:
        readings.add(assigned)
    if len(readings) > 1:
        raise UserError(
            f"{source}: device {assigned} was assigned, which is the name of one device here and "
            "the position of another. List the devices in ascending order from 0, or unset it."
        )
    if not readings:
        raise UserError(
            f"{source}: device {assigned} was assigned, but is not among them. "
            "Give the scheduler and the process the same devices."
        )
    return readings.pop()


def _index(physical: str, mask: tuple[str, ...] | None, *, source: str) -> int:
    if mask is not None:
        return mask.index(physical)
    if not physical.isdecimal():
        raise UserError(f"{source}: device {physical} has no index. List the devices in it.")
    return int(physical)
