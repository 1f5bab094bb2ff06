# SPDX-License-Identifier: Apache-2.0
"""``tandem doctor``: print the devices and packages of this machine, and what is missing.

It must run where packages are missing, and imports only ``packaging`` at its top. It makes no
network request. Exit code 0 if the core can run, else 2.

``tandem doctor RUN`` compares the checkpoints of a run with their manifests instead. Exit code 0 if
all are whole, else 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from tandem.errors import UserError

CORE_FAILED = 2
MIN_PYTHON = (3, 11)
LOW_DISK_BYTES = 5 * 1024**3

CORE = MappingProxyType(
    {
        "torch": "tensors, autograd, optimizers",
        "transformers": "tokenizers, chat templates, model configs",
        "tokenizers": "tokenizers of the quickstart",
        "safetensors": "reading and writing weights",
        "pydantic": "the typed configuration",
        "hydra-core": "the grammar of overrides",
        "omegaconf": "YAML recipes with interpolation",
        "pyyaml": "YAML recipes",
        "numpy": "the order of the data, packing",
        "jinja2": "chat templates, the report",
        "rich": "progress bar and tables",
        "packaging": "comparing versions",
        "psutil": "memory metrics",
        "httpx": "requests to the model hub",
        "h11": "the endpoint that agents call",
        "websockets": "environments of OpenEnv",
        "regex": "calls by response templates",
        "pillow": "pictures of the data",
        "huggingface-hub": "its cache, downloads from it",
        "markupsafe": "the report",
        "cloudpickle": "functions that tandem.train gets from Python",
    }
)
"""The purpose of each required package."""
OPTIONAL = MappingProxyType(
    {
        "pyarrow": "parquet files (JSONL works without)",
        "tensorboard": "trainer.logger=tensorboard",
        "math-verify": "rewards for mathematics beyond GSM8K",
        "matplotlib": "tandem compare --plot",
        "wandb": "trainer.logger=wandb",
        "ray": "runs of several processes",
        "datasets": "tandem prepare from the hub",
    }
)
"""The purpose of each optional package."""


@dataclass(frozen=True)
class Dependency:
    """A package that tandem declares.

    Attributes:
        version: the installed version, None if it is missing.
        is_core: whether it is required.
    """

    name: str
    min_version: str
    purpose: str
    is_core: bool = True
    version: str | None = None

    @property
    def problem(self) -> str:
        """The reason why the installed version cannot be used, "" if it can."""
        if self.version is None:
            return "missing"
        # A pre-release, common in vendors' containers, counts as the release.
        if Version(Version(self.version).base_version) < Version(self.min_version):
            return f"too old, at least {self.min_version}"
        return ""


def declared_dependencies() -> list[Dependency]:
    """Return the packages that tandem's own metadata declares, the required ones first."""
    try:
        lines = metadata.requires("tandem-rl") or []
    except metadata.PackageNotFoundError:
        return []
    found: dict[str, Dependency] = {}
    for requirement in map(Requirement, lines):
        name = requirement.name
        is_core = name in CORE
        minimum = next((s.version for s in requirement.specifier if s.operator == ">="), "0")
        if is_core or name in OPTIONAL:
            purpose = CORE[name] if is_core else OPTIONAL[name]
            found[name] = Dependency(name, minimum, purpose, is_core)
    return [found[name] for name in (*CORE, *OPTIONAL) if name in found]


@dataclass(frozen=True)
class Diagnosis:
    """The output of ``tandem doctor``.

    Attributes:
        jail: the protections of code that a model wrote, and what holds each of them here.
        problems: the reasons why the core cannot run.
    """

    tandem: str
    python: str
    system: str
    cpu_cores: int
    torch: dict[str, Any]
    platform: dict[str, Any]
    disk_free_bytes: int
    dependencies: tuple[Dependency, ...]
    jail: dict[str, dict[str, str]]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def run(arguments: Sequence[str]) -> int:
    """Print the diagnosis; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="tandem doctor", description="Check this installation, or the checkpoints of a run."
    )
    parser.add_argument("run", metavar="RUN", nargs="?", type=Path, help="folder of a run to check")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.run is not None:
        return _check_run(options.run, as_json=options.json)
    diagnosis = diagnose(declared_dependencies())
    if options.json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        print("\n".join(_lines(diagnosis)))
    return CORE_FAILED if diagnosis.problems else 0


def _check_run(folder: Path, *, as_json: bool) -> int:
    """Print which checkpoints of a run are whole; return the exit code."""
    importlib.import_module("tandem.report.run_folder").require_folder(folder)
    store = importlib.import_module("tandem.checkpoint.store")
    conditions: dict[str, str] = store.describe_checkpoints(folder)
    if as_json:
        print(json.dumps(conditions, indent=2))
    else:
        for name, damage in conditions.items():
            print(f"{'NO ' if damage else 'ok '} {name:<18} {damage or 'whole'}")
    return CORE_FAILED if any(conditions.values()) else 0


def diagnose(dependencies: Sequence[Dependency]) -> Diagnosis:
    """Inspect interpreter, packages, devices and disk."""
    found = tuple(replace(one, version=_version(one.name)) for one in dependencies)
    problems = [f"{f.name} is {f.problem}: {f.purpose}" for f in found if f.is_core and f.problem]
    if sys.version_info < MIN_PYTHON:
        problems.insert(0, f"Python {platform.python_version()} is too old, at least 3.11")
    torch, failure = _describe_torch()
    platform_facts: dict[str, Any] = {}
    if torch:
        platform_facts, failure = _describe_platforms()
    problems += [failure] if failure else []
    free = shutil.disk_usage(Path.cwd()).free
    warnings = [f"{free / 1024**3:.1f} GiB of disk left here"] if free < LOW_DISK_BYTES else []
    if not found:
        warnings.append("tandem is not installed (pip install -e .): its requirements are unknown")
    jail, failure = _describe_jail()
    warnings += [failure] if failure else []
    return Diagnosis(
        tandem=importlib.import_module("tandem").__version__,
        python=platform.python_version(),
        system=platform.platform(),
        cpu_cores=_usable_cores(),
        torch=torch,
        platform=platform_facts,
        disk_free_bytes=free,
        dependencies=found,
        jail=jail,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def _usable_cores() -> int:
    """Return the cores that this process may use; a container may have fewer than its machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _describe_torch() -> tuple[dict[str, Any], str]:
    """Return facts of the torch build, and why torch cannot be imported, "" if it can."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return {}, f"torch cannot be imported: {error}"
    return {"version": torch.__version__, "threads": torch.get_num_threads()}, ""


def _describe_jail() -> tuple[dict[str, dict[str, str]], str]:
    """Return the protections of the jail, and what is missing in one line, "" if nothing is."""
    code_jail = importlib.import_module("tandem.children.code_jail")
    try:
        protections = code_jail.survey_protections()
    except code_jail.JailError as error:
        return {}, f"code that a model wrote cannot be executed: {error}"
    jail = {one.name: {"promise": one.promise, "held_by": one.held_by} for one in protections}
    lost = [one.name for one in protections if not one.held_by]
    if not lost:
        return jail, ""
    return jail, (
        f"the kernel does not hold code that a model wrote ({', '.join(lost)}): "
        "agent.isolation=strict refuses such tools"
    )


def _describe_platforms() -> tuple[dict[str, Any], str]:
    """Return facts of the platform that runs use here, and why there is none, "" if there is."""
    select = importlib.import_module("tandem.platforms.select")
    others = {one.name: one.problem or "can be used" for one in select.probe_all()}
    try:
        selection = select.choose_platform(select.AUTO, os.environ)
    except UserError as error:
        return {"name": None, "reason": "", "devices": [], "others": others}, str(error)
    chosen = selection.platform
    del others[chosen.name]
    facts = {
        "name": chosen.name,
        "reason": selection.reason,
        "devices": [_device_name(chosen, index) for index in range(chosen.num_devices())],
        "others": others,
    }
    return facts, ""


def _device_name(platform: Any, index: int) -> str:
    """Return the name of the device of an index, which becomes that of this thread."""
    platform.use_device(index)
    return platform.device_name()


def _lines(diagnosis: Diagnosis) -> list[str]:
    chosen = diagnosis.platform
    lines = [
        f"tandem        {diagnosis.tandem}",
        f"Python        {diagnosis.python} on {diagnosis.system}",
        f"CPU cores     {diagnosis.cpu_cores}",
        f"free disk     {diagnosis.disk_free_bytes / 1024**3:.1f} GiB",
    ]
    if chosen and chosen["name"]:
        lines.append(f"platform      {chosen['name']}: {', '.join(chosen['devices'])}")
        lines.append(f"              because {chosen['reason']}")
    others = chosen["others"] if chosen else {}
    lines += [f"not used      {name:<8} {reason}" for name, reason in others.items()]
    for name, protection in diagnosis.jail.items():
        held = protection["held_by"] or f"NOT HELD: a program could {protection['promise']}"
        lines.append(f"jail          {name:<10} {held}")
    lines.append("")
    for found in diagnosis.dependencies:
        mark = "ok " if not found.problem else ("NO " if found.is_core else "-  ")
        state = f"{found.version or ''} {found.problem}".strip()
        lines.append(f"{mark} {found.name:<13} {state:<28} {found.purpose}")
    lines += ["", *(f"warning: {warning}" for warning in diagnosis.warnings)]
    listed = {
        f"{found.name} is {found.problem}: {found.purpose}" for found in diagnosis.dependencies
    }
    lines += [f"problem: {problem}" for problem in diagnosis.problems if problem not in listed]
    if diagnosis.problems:
        lines.append('Install what is marked NO: pip install -e . (or pip install "NAME>=VERSION")')
    else:
        lines.append("The core can run. Try: tandem quickstart")
    return lines
