# SPDX-License-Identifier: Apache-2.0
"""``tandem doctor``: what this machine has, what is missing, and what the missing is for.

Runs where packages are missing, so it imports none at its top. It asks nothing of the network; a
hub out of reach shows when it is needed. Exit code 0 if the core can run, else 2.
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
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tandem.errors import UserError

CORE_FAILED = 2
MIN_PYTHON = (3, 11)
LOW_DISK_BYTES = 5 * 1024**3


@dataclass(frozen=True)
class Dependency:
    """A distribution, its lowest version that works, and whether the core needs it."""

    name: str
    min_version: str
    purpose: str
    is_core: bool = True


DEPENDENCIES = (
    Dependency("torch", "2.11", "tensors, autograd, optimizers"),
    Dependency("transformers", "5.17", "tokenizers, chat templates, model configs"),
    Dependency("tokenizers", "0.22", "tokenizers of the quickstart"),
    Dependency("safetensors", "0.5", "reading and writing weights"),
    Dependency("pydantic", "2.9", "the typed configuration"),
    Dependency("hydra-core", "1.3.2", "the grammar of overrides"),
    Dependency("omegaconf", "2.3", "YAML recipes with interpolation"),
    Dependency("numpy", "1.26", "the order of the data, packing"),
    Dependency("jinja2", "3.1", "chat templates, the report"),
    Dependency("rich", "13", "progress bar and tables"),
    Dependency("psutil", "5.9", "memory metrics"),
    Dependency("httpx", "0.27", "asking the model hub"),
    Dependency("huggingface-hub", "1.5", "its cache, fetching from it"),
    Dependency("markupsafe", "2.1", "the report"),
    Dependency("pyarrow", "15", "parquet files (JSONL works without)", is_core=False),
    Dependency("tensorboard", "2.16", "trainer.logger=tensorboard", is_core=False),
    Dependency("math-verify", "0.8", "rewards for mathematics beyond GSM8K", is_core=False),
    Dependency("matplotlib", "3.8", "tandem report as a picture", is_core=False),
    Dependency("wandb", "0.18", "trainer.logger=wandb", is_core=False),
)


@dataclass(frozen=True)
class Found:
    """A dependency and what is there of it; ``version`` is None if it is missing."""

    name: str
    version: str | None
    min_version: str
    purpose: str
    is_core: bool

    @property
    def problem(self) -> str:
        """ "" or what is wrong with it."""
        if self.version is None:
            return "missing"
        if _release(self.version) < _release(self.min_version):
            return f"too old, at least {self.min_version}"
        return ""


@dataclass(frozen=True)
class Diagnosis:
    """All that ``tandem doctor`` says; ``problems`` are the reasons why the core cannot run."""

    tandem: str
    python: str
    system: str
    cpu_cores: int
    torch: dict[str, Any]
    platform: dict[str, Any]
    disk_free_bytes: int
    dependencies: tuple[Found, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def run(arguments: Sequence[str]) -> int:
    """Print the diagnosis; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tandem doctor", description="Check this installation.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    diagnosis = diagnose(DEPENDENCIES)
    if options.json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        print("\n".join(_lines(diagnosis)))
    return CORE_FAILED if diagnosis.problems else 0


def diagnose(dependencies: Sequence[Dependency]) -> Diagnosis:
    """Look at interpreter, packages, devices and disk."""
    found = tuple(_find(dependency) for dependency in dependencies)
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
    return Diagnosis(
        tandem=importlib.import_module("tandem").__version__,
        python=platform.python_version(),
        system=platform.platform(),
        cpu_cores=_usable_cores(),
        torch=torch,
        platform=platform_facts,
        disk_free_bytes=free,
        dependencies=found,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def _usable_cores() -> int:
    """Cores this process may use, which a container may have fewer of than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _find(dependency: Dependency) -> Found:
    try:
        version = metadata.version(dependency.name)
    except metadata.PackageNotFoundError:
        version = None
    return Found(version=version, **asdict(dependency))


def _release(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of ``2.13.0+cpu``; stops at the first part that is no number."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _describe_torch() -> tuple[dict[str, Any], str]:
    """(facts of the torch build and its devices, why it cannot be imported or "")."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return {}, f"torch cannot be imported: {error}"
    return {"version": torch.__version__, "threads": torch.get_num_threads()}, ""


def _describe_platforms() -> tuple[dict[str, Any], str]:
    """(the platform that runs use here, why it, and why no other; why there is none or "")."""
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
        "devices": [chosen.device_name() for _ in range(chosen.num_devices())],
        "others": others,
    }
    return facts, ""


def _lines(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis for people."""
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
    lines.append("")
    for found in diagnosis.dependencies:
        mark = "ok " if not found.problem else ("NO " if found.is_core else "-  ")
        state = f"{found.version or ''} {found.problem}".strip()
        lines.append(f"{mark} {found.name:<13} {state:<28} {found.purpose}")
    lines += ["", *(f"warning: {warning}" for warning in diagnosis.warnings)]
    lines += [f"problem: {problem}" for problem in diagnosis.problems]
    if diagnosis.problems:
        lines.append('Install what is missing: pip install -e . (or pip install "NAME>=VERSION")')
    else:
        lines.append("The core can run. Try: tandem quickstart")
    return lines
