# SPDX-License-Identifier: Apache-2.0
"""A5 and A17: the whole contract suite of platforms, on the host and on each vendor's double."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tandem.cli import certify
from tandem.platforms.record import CPU, Platform
from tandem.testing.certificates import read_certificates
from tandem.testing.contracts.check import EXACT
from tandem.testing.contracts.suite import CHECKS, SuiteReport, run_suite
from tandem.testing.doubles import DOUBLES

A5_ERROR = 1e-6
RANKS = 2


def require_passed(report: SuiteReport) -> None:
    assert report.failures == ()
    assert [outcome.name for outcome in report.outcomes] == [check.name for check in CHECKS]


def test_a5_the_host_passes_the_suite_and_is_certified(tmp_path: Path) -> None:
    arguments = ["--platform", "cpu", "--ranks", str(RANKS), "--output", str(tmp_path)]
    assert certify.run(arguments) == 0
    (certificate,) = read_certificates(tmp_path)
    assert certificate.passed and certificate.is_hardware
    assert (certificate.platform, certificate.num_ranks) == ("cpu", RANKS)
    assert list(certificate.checks) == [check.name for check in CHECKS]


def test_a5_a17_vendors_pass_the_suite(vendor_double: Platform) -> None:
    """A5; A17 too: these libraries have no averages, and every rank reports the global loss."""
    assert not vendor_double.averages
    report = run_suite(vendor_double, num_ranks=RANKS)
    require_passed(report)
    assert report.found.is_double and report.found.num_devices == RANKS
    assert vendor_double.name in report.found.device_name
    measured = {name: x for one in report.outcomes for name, x in one.measured.items()}
    assert measured["metrics_error"] <= A5_ERROR and measured["weights_error"] <= A5_ERROR
    assert measured["log_prob_error"] <= EXACT


def test_one_process_runs_no_collectives() -> None:
    report = run_suite(CPU, num_ranks=1)
    assert not report.failures
    idle = {one.name for one in report.outcomes if not one.was_run and one.name.startswith("world")}
    assert idle == {"world/collectives", "world/averages", "world/subgroups", "world/broadcast"}


def test_a_device_that_counts_no_memory_fails_that_check_alone(
    doubles: Callable[..., Platform],
) -> None:
    platform = replace(doubles("mlu"), memory_allocated_bytes=int)
    report = run_suite(platform, num_ranks=1)
    (failure,) = report.failures
    assert failure.startswith("device/memory: rank 0: ContractError: 0 allocated (device.py:")


def test_doubles_are_of_all_vendors_that_plug_into_torch() -> None:
    assert DOUBLES == ("npu", "musa", "mlu")
