# SPDX-License-Identifier: Apache-2.0
"""``tandem certify``: run the contract suite on the platform of this machine and write the
certificate. Exit code 0 if everything passed, else 1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

from tandem.errors import UserError
from tandem.platforms.record import Platform
from tandem.platforms.select import AUTO, select_platform
from tandem.testing.certificates import certificate_of, write_certificate
from tandem.testing.contracts.suite import MAX_RANKS, Outcome, run_suite
from tandem.testing.processes import ProcessError

FAILED = 1


def run(arguments: Sequence[str]) -> int:
    """Run the suite and print one line per check; return the exit code."""
    options = _parse(arguments)
    platform = select_platform(options.platform, key="--platform")
    ranks = _ranks(platform) if options.ranks is None else options.ranks
    if ranks < 1:
        raise UserError(
            "--ranks", ranks, rule="must be at least 1", remedy="Leave it out for one per device."
        )
    if not 0 < options.timeout < math.inf:
        raise UserError(
            "--timeout",
            options.timeout,
            rule="must be a positive number of seconds",
            remedy="Leave it out for 600.",
        )
    folder = _writable(Path(options.output))
    try:
        report = run_suite(platform, num_ranks=ranks, timeout_s=options.timeout)
    except ProcessError as error:
        raise UserError(
            "--platform", platform.name, rule=f"the suite did not end: {error}"
        ) from error
    for outcome in report.outcomes:
        print(_line(outcome))
    today = datetime.now(UTC).date()
    certificate = certificate_of(platform, report, today=today)
    path = write_certificate(certificate, folder)
    verdict = "passed" if certificate.passed else f"{len(report.failures)} failed"
    print(f"{certificate.device}, {ranks} process(es): {verdict}. Written to {path}")
    return 0 if certificate.passed else FAILED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tandem certify", description="Run the contract suite on this machine's platform."
    )
    parser.add_argument("--platform", default=AUTO, help="name of a platform (default: auto)")
    parser.add_argument("--ranks", type=int, help="number of processes, which share the devices")
    parser.add_argument("--output", default="certificates", help="folder for the certificate")
    parser.add_argument("--timeout", type=float, default=600, help="limit of the suite, in seconds")
    return parser.parse_args(arguments)


def _writable(folder: Path) -> Path:
    # Checked before the suite, which runs for a minute.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(
            "--output",
            str(folder),
            rule=f"cannot be written to ({error.strerror})",
            remedy="Name another folder.",
        ) from error


def _ranks(platform: Platform) -> int:
    """Return the number of processes: one per device, or the maximum on the host."""
    return min(MAX_RANKS, platform.num_devices()) if platform.has_own_memory else MAX_RANKS


def _line(outcome: Outcome) -> str:
    measured = ", ".join(f"{name} {value:.3g}" for name, value in outcome.measured.items())
    state = "NO " if outcome.failure else "ok " if outcome.was_run else "-  "
    return f"{state} {outcome.name:<22} {outcome.seconds:6.2f} s  {outcome.failure or measured}"
