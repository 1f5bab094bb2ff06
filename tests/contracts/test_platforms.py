# SPDX-License-Identifier: Apache-2.0
"""A5 and A17: the whole contract suite of platforms, on the host and on each vendor's double."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.cli import certify
from tandem.platforms.record import CPU, Platform
from tandem.testing.certificates import read_certificates
from tandem.testing.contracts.check import EXACT, UNIT_ROUNDOFF, Bench, ContractError
from tandem.testing.contracts.model import compare_training, update_limit
from tandem.testing.contracts.suite import CHECKS, SuiteReport, run_suite
from tandem.testing.doubles import DOUBLES
from tandem.testing.processes import Here, Launch, run_processes

RANKS = 2

# A double computes with the host's kernels. Its metrics differ from the host's by the order in
# which four micro-batches are added (3 u on each side) and by attention in plain products, whose 85
# terms (head 64, keys 21) differ by 3.5 sqrt(85) u on each side in one token, and by sqrt(54) times
# less in the mean over the 54 tokens: 2 (3 + 4.4) u = 8.8e-7.
A5_ERROR = 16 * UNIT_ROUNDOFF


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
    assert measured["metrics_error"] <= A5_ERROR
    assert measured["update_error"] <= update_limit(A5_ERROR)
    assert measured["log_prob_error"] <= EXACT


def _train_wrongly(here: Here, folder: Path) -> list[str]:
    """Return the causes for which training of a wrong kind is refused, or "" where it is not."""
    variants = [
        {"lr": 2e-4, "num_steps": 3, "dealt_to": here.rank},
        {"lr": 2e-4 * 1.001, "num_steps": 3, "dealt_to": here.rank},
        {"lr": 2e-4, "num_steps": 2, "dealt_to": here.rank},
        {"lr": 2e-4, "num_steps": 3, "dealt_to": 0},
    ]
    causes: list[str] = []
    for variant in variants:
        try:
            compare_training(Bench(here, folder), **variant)
        except ContractError as error:
            causes.append(str(error).partition(":")[0])
        else:
            causes.append("")
    return causes


def test_the_bounds_tell_another_learning_rate_a_missing_step_and_a_missing_share(
    tmp_path: Path,
) -> None:
    """The learning rate is off by a thousandth; one share of the batch is trained on twice."""
    launch = Launch()
    told = run_processes(_train_wrongly, [CPU] * RANKS, args=(tmp_path,), launch=launch)
    for right, *wrong in told:
        assert right == "" and all(wrong)
        assert wrong[1] == "update", "the metrics of the steps that were made are right"


@pytest.mark.parametrize("error", [1e-6, 1e-5, 1e-3])
def test_the_bound_on_updates_holds_for_errors_of_that_size(error: float) -> None:
    """Updates by AdamW with gradients that are off by a share of their scale."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(200_000, generator=generator, dtype=torch.float64)
    off = gradients + error * (2 * torch.rand(200_000, generator=generator) - 1)
    moments = [(0.1 * one + 0.09 * gradients.roll(1)) / 0.19 for one in (off, gradients)]
    scales = [((one**2 + gradients.roll(1) ** 2) / 2).sqrt() for one in (off, gradients)]
    found, expected = (m / s for m, s in zip(moments, scales, strict=True))
    assert (found - expected).abs().mean() / expected.abs().mean() <= update_limit(error)


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
