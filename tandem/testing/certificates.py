# SPDX-License-Identifier: Apache-2.0
"""Certificates, the results of ``tandem certify`` as JSON files, and the table of support.

The table is made from a folder of certificates and claims only what they show.
"""

from __future__ import annotations

import json
import platform as system
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tandem
from tandem.platforms.record import Platform
from tandem.platforms.registry import BUILT_IN
from tandem.testing.contracts.suite import SuiteReport
from tandem.testing.doubles import DOUBLES

NOTHING = "there is nothing to check with these devices"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of one run of the suite.

    Attributes:
        is_hardware: False for a double.
        day: the ISO date.
        checks: for each check by name: whether it passed, the reason if not, its seconds and
            measurements; or why it was not run.
    """

    platform: str
    device: str
    is_hardware: bool
    num_devices: int
    num_ranks: int
    day: str
    passed: bool
    versions: Mapping[str, str]
    checks: Mapping[str, Mapping[str, Any]]

    @property
    def file_name(self) -> str:
        """The name of the certificate's file; each kind of device has one."""
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        parts = (self.platform, device) if device != self.platform else (device,)
        return f"{'-'.join(parts)}.json"


def certificate_of(platform: Platform, report: SuiteReport, *, today: date) -> Certificate:
    """Make the certificate of a run of the suite."""
    checks = {
        one.name: {
            **({"passed": not one.failure} if one.was_run else {"not_run": NOTHING}),
            **({"failure": one.failure} if one.failure else {}),
            "seconds": round(one.seconds, 3),
            **{name: float(f"{value:.3g}") for name, value in one.measured.items()},
        }
        for one in report.outcomes
    }
    versions = {"tandem": tandem.__version__, "python": system.python_version()}
    return Certificate(
        platform=platform.name,
        device=report.found.device_name,
        is_hardware=not report.found.is_double,
        num_devices=report.found.num_devices,
        num_ranks=report.num_ranks,
        day=today.isoformat(),
        passed=not report.failures,
        versions=versions | dict(report.found.versions),
        checks=checks,
    )


def write_certificate(certificate: Certificate, folder: Path) -> Path:
    """Write a certificate into a folder, made if necessary, and replace the device's older one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / certificate.file_name
    path.write_text(json.dumps(asdict(certificate), indent=1) + "\n")
    return path


def read_certificates(folder: Path) -> list[Certificate]:
    """Read all certificates of a folder, in the order of their file names."""
    return [Certificate(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def support_table(certificates: Sequence[Certificate]) -> str:
    """Return a Markdown table of the support for each platform, with its evidence."""
    lines = [
        "| platform | names | torch device | collectives | support | seen on |",
        "|---|---|---|---|---|---|",
    ]
    for platform in BUILT_IN:
        own = [one for one in certificates if one.platform == platform.name and one.is_hardware]
        passed = [one for one in own if one.passed]
        seen = "; ".join(_seen(one) for one in passed) or "-"
        names = ", ".join(f"`{name}`" for name in (platform.name, *platform.aliases))
        lines.append(
            f"| {platform.vendor if platform.vendor != 'any' else 'host'} | {names} "
            f"| `{platform.device_type}` | {platform.collectives} "
            f"| {_support(platform, passed)} | {seen} |"
        )
    return "\n".join(lines) + "\n"


def _support(platform: Platform, passed: Sequence[Certificate]) -> str:
    if passed:
        return f"hardware-verified {max(one.day for one in passed)}"
    return "contract-tested" if platform.name in DOUBLES else "record only"


def _seen(certificate: Certificate) -> str:
    torch = certificate.versions["torch"]
    seen = f"{certificate.num_ranks} x {certificate.device}, torch {torch}, {certificate.day}"
    return seen if certificate.num_ranks > 1 else f"{seen}, collectives: not run (1 device)"
