# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml declares what the package imports, no more; constraints.txt pins it."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache

from tests.arch.layout import OPTIONAL_PACKAGES
from tests.arch.rules.imports import package_of
from tests.arch.source import ROOT, imports, in_folders, project_modules

DISTRIBUTIONS = {"PIL": "pillow", "hydra": "hydra-core", "yaml": "pyyaml"}
"""Import names that differ from the distribution's by more than a hyphen."""


def distribution(package: str) -> str:
    """The normal form of the distribution that provides an import name."""
    return DISTRIBUTIONS.get(package, package).replace("_", "-").lower()


def requirement_names(requirements: list[str]) -> set[str]:
    """Names in normal form, without extras and versions."""
    names = (re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements)
    return {name.replace("_", "-").lower() for name in names}


@cache
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def declared(extra: str | None = None) -> set[str]:
    """What the package requires, or one of its extras."""
    if extra is None:
        return requirement_names(project()["dependencies"])
    return requirement_names(project()["optional-dependencies"][extra])


def imported() -> set[str]:
    """Distributions that the package's files import, lazily or not."""
    packages = {
        package_of(target)
        for module in in_folders(project_modules(), "tandem")
        for target, _ in imports(module)
    }
    return {distribution(p) for p in packages - sys.stdlib_module_names - {"tandem"}}


def test_every_import_is_declared() -> None:
    optional = {distribution(package) for package in OPTIONAL_PACKAGES}
    undeclared = imported() - declared() - declared("wandb") - optional
    assert not undeclared, f"add to pyproject.toml: {sorted(undeclared)}"


def test_every_declared_dependency_is_imported() -> None:
    unused = declared() - imported()
    assert not unused, f"pyproject.toml declares what nothing imports: {sorted(unused)}"


def test_constraints_pin_every_dependency_without_a_local_version() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    loose = [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)]
    assert not loose, f"not of the form name==version: {loose}"
    missing = (declared() | declared("dev")) - requirement_names(pins)
    assert not missing, f"constraints.txt lacks {sorted(missing)}"
