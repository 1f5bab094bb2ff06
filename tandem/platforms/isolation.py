# SPDX-License-Identifier: Apache-2.0
"""The restriction of a worker process to its own device: environment variables and one index.

The plan is a pure function of the device that the scheduler assigned and of the environment that
the process inherited; it needs no torch and is applied before a vendor's library is loaded. It
never shows a process more devices than it inherited, and rejects ambiguous assignments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.errors import UserError

_NAME = re.compile(r"-?\d+|[A-Za-z]+-[\w./-]+")
_NO_DEVICES = "NoDevFiles"
"""The value that some schedulers write if they assign no device."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """The restriction of a platform's processes to their own devices, and Ray's view of devices.

    Attributes:
        mode: ``none``: there is nothing to isolate. ``mask``: a process sees only its own device,
            with index 0. ``select``: it sees its inherited devices and uses its own by index.
        resource: Ray's name of such a device.
        is_known_to_ray: whether Ray finds these devices itself and assigns them by the names in
            ``variables``; otherwise it counts them from 0.
        variables: environment variables that list visible devices. The plan sets the first; the
            others are synonyms and are removed.
        renumbering: a variable that hides devices, which shifts the indices in ``variables``.
        prefix: the text before the list in the values of the variables.
    """

    mode: Literal["none", "mask", "select"]
    resource: str
    is_known_to_ray: bool = True
    variables: tuple[str, ...] = ()
    renumbering: str = ""
    prefix: str = ""


HOST = Visibility(mode="none", resource="CPU")
CUDA_LIKE = Visibility(
    mode="mask",
    resource="GPU",
    variables=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    renumbering="ROCR_VISIBLE_DEVICES",
)
"""The devices of NVIDIA and AMD: torch calls both cuda, and AMD's runtime reads either variable."""


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    """The preparations of a process before it loads a vendor's library.

    Attributes:
        env_set, env_unset: the changes of its environment.
        local_index: the index of its device among its visible devices.
        physical_id: the device's name on the node; "" if there is nothing to isolate.
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
    """Plan how a process uses its assigned device and no other.

    Args:
        assigned: the ids that the scheduler assigned to this process: exactly one.
        inherited: the environment of the process.
        node_visible: all ids that the scheduler assigns on this node, in order; empty if unknown.
            They decide whether an id is a device's name or a position in the inherited list.

    Raises:
        UserError: the assignment is ambiguous or contradicts the environment.

    Example:
        >>> str(plan_isolation(CUDA_LIKE, ["5"], inherited={"CUDA_VISIBLE_DEVICES": "4,5,6,7"}))
        'CUDA_VISIBLE_DEVICES=5, device 5 as index 0'
    """
    if visibility.mode == "none":
        return IsolationPlan()
    if len(assigned) != 1 or "," in assigned[0]:
        raise UserError(
            visibility.resource,
            ",".join(assigned),
            rule="a worker uses exactly one device",
            remedy="Let the scheduler assign one to each.",
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
    """Change ``environment`` as planned. Children that start later inherit it."""
    for name in plan.env_unset:
        environment.pop(name, None)
    environment.update(plan.env_set)


def is_restricted(visibility: Visibility, inherited: Mapping[str, str]) -> bool:
    """Return whether an environment lists devices; an empty list hides all of them."""
    return any(name in inherited for name in (*visibility.variables, visibility.renumbering))


def inherited_names(visibility: Visibility, inherited: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices that an environment lists as visible; none if it lists none.

    Raises:
        UserError: the list is malformed, or two lists contradict each other.
    """
    return _inherited_mask(visibility, inherited)[1] or ()


def _inherited_mask(
    visibility: Visibility, inherited: Mapping[str, str]
) -> tuple[str, tuple[str, ...] | None]:
    """Return (name=value of the variable that restricts this process, its list or None)."""
    names = [name for name in visibility.variables if name in inherited]
    shown = ", ".join(f"{name}={inherited[name]}" for name in names)
    if visibility.renumbering in inherited:
        renumbering = f"{visibility.renumbering}={inherited[visibility.renumbering]}"
        if names:
            rule = "indices of the second count within the first"
            raise UserError(f"{renumbering}, {shown}", rule=rule, remedy="Set one of them.")
        names, shown = [visibility.renumbering], renumbering
    if not names:
        return next(iter(visibility.variables), ""), None
    if len({inherited[name] for name in names}) > 1:
        rule = "both name the visible devices, and differ"
        raise UserError(shown, rule=rule, remedy="Set one of them.")
    return shown, _parse(inherited[names[0]], source=shown, prefix=visibility.prefix)


def _parse(value: str, *, source: str, prefix: str) -> tuple[str, ...]:
    if not value.strip() or value == _NO_DEVICES:
        return ()
    parts = [part.strip() for part in value.removeprefix(prefix).split(",")]
    has_prefix = value.startswith(prefix)
    if not has_prefix or not all(_NAME.fullmatch(part) for part in parts):
        example = f"{prefix}0,1"
        raise UserError(source, rule="is not a list of devices", remedy=f"Write it as {example}.")
    end = next((i for i, part in enumerate(parts) if part.startswith("-")), len(parts))
    if len(set(parts[:end])) < end:
        raise UserError(source, rule="names a device twice", remedy="Name each once.")
    return tuple(parts[:end])  # drivers ignore what follows a negative index


def _own_name(assigned: str, *, source: str, node_visible: Sequence[str]) -> str:
    if node_visible and assigned not in node_visible:
        raise UserError(
            source,
            rule=f"device {assigned} was assigned, but this node has {','.join(node_visible)}",
            remedy="Check how the scheduler numbers devices.",
        )
    return assigned


def _in_mask(
    assigned: str, mask: tuple[str, ...], *, source: str, node_visible: Sequence[str]
) -> str:
    """Return the name of the assigned device, which is a name in ``mask`` or a position in it."""
    if not mask:
        rule = f"hides all devices, but {assigned} was assigned"
        raise UserError(source, rule=rule, remedy="Unset it.")
    positions = tuple(str(i) for i in range(len(mask)))
    names = set(mask)
    counts = not node_visible or tuple(node_visible) == positions
    shares_names = not node_visible or names <= set(node_visible) or set(node_visible) <= names
    readings = {mask[int(assigned)]} if counts and assigned in positions else set[str]()
    if shares_names and assigned in names:
        readings.add(assigned)
    if len(readings) > 1:
        raise UserError(
            source,
            rule=f"device {assigned} was assigned, which is the name of one device here and the "
            "position of another",
            remedy="List the devices in ascending order from 0, or unset it.",
        )
    if not readings:
        raise UserError(
            source,
            rule=f"device {assigned} was assigned, but is not among them",
            remedy="Give the scheduler and the process the same devices.",
        )
    return readings.pop()


def _index(physical: str, mask: tuple[str, ...] | None, *, source: str) -> int:
    if mask is not None:
        return mask.index(physical)
    if not physical.isdecimal():
        rule = f"device {physical} has no index"
        raise UserError(source, rule=rule, remedy="List the devices in it.")
    return int(physical)
