# SPDX-License-Identifier: Apache-2.0
"""Certificates are what was measured, and the documented table says no more than they show.

Write the table anew with ``python -m tests.unit.testing.test_certificates``.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

from tandem.platforms.record import CPU, CUDA
from tandem.platforms.vendors import MUSA_PLATFORM
from tandem.testing.certificates import (
    NOTHING,
    Certificate,
    certificate_of,
    read_certificates,
    support_table,
    write_certificate,
)
from tandem.testing.contracts.suite import CHECKS, Found, Outcome, SuiteReport

DOCS = Path(__file__).resolve().parents[3] / "docs"
START, END = "<!-- table -->\n", "<!-- end of table -->"
FOUND = Found(
    device_name="Acme X-1 (80GB)",
    num_devices=4,
    is_double=False,
    versions={"torch": "2.13.0"},
)
PASSED = Outcome("device/tensors", "", 0.12345, {"x_gb_s": 12.3456})
FAILED = Outcome("world/collectives", "rank 1: ContractError: all_reduce", 1.0, {})


def certificate(*outcomes: Outcome, found: Found = FOUND) -> Certificate:
    report = SuiteReport(found, 2, outcomes)
    return certificate_of(CUDA, report, today=date(2030, 1, 2))


def table_row(name: str, *certificates: Certificate) -> str:
    lines = support_table(certificates).splitlines()
    (row,) = [line for line in lines if line.split("|")[2].startswith(f" `{name}`")]
    return row


def test_certificate_comes_back_from_its_file(tmp_path: Path) -> None:
    made = certificate(PASSED, FAILED)
    path = write_certificate(made, tmp_path / "folder")
    assert path.name == "cuda-acme-x-1-80gb.json"
    assert read_certificates(path.parent) == [made]
    assert not made.passed and made.day == "2030-01-02" and made.is_hardware
    assert made.checks == {
        "device/tensors": {"passed": True, "seconds": 0.123, "x_gb_s": 12.3},
        "world/collectives": {
            "passed": False,
            "failure": "rank 1: ContractError: all_reduce",
            "seconds": 1.0,
        },
    }


def test_what_was_not_run_is_not_said_to_have_passed() -> None:
    idle = Outcome("world/broadcast", "", 0.0, {}, was_run=False)
    made = certificate(PASSED, idle)
    assert made.passed
    assert made.checks["world/broadcast"] == {"not_run": NOTHING, "seconds": 0.0}
    alone = table_row("cuda", replace(made, num_ranks=1))
    assert alone.endswith("2030-01-02, collectives: not run (1 device) |")
    assert "not run" not in table_row("cuda", made)


def test_only_passing_hardware_is_called_verified() -> None:
    verified = certificate(PASSED)
    assert "hardware-verified 2030-01-02" in table_row("cuda", verified)
    assert "2 x Acme X-1 (80GB), torch 2.13.0, 2030-01-02" in table_row("cuda", verified)
    assert "record only" in table_row("cuda", certificate(PASSED, FAILED))
    double = certificate(PASSED, found=replace(FOUND, is_double=True))
    assert "record only" in table_row("cuda", double)
    assert "contract-tested" in table_row(MUSA_PLATFORM.name)
    assert "record only" in table_row("rocm")


def test_documented_table_is_current() -> None:
    documented = (DOCS / "platforms.md").read_text().partition(START)[2].partition(END)[0]
    assert documented == support_table(read_certificates(DOCS / "certificates"))


def test_committed_certificates_are_of_the_whole_suite() -> None:
    found = read_certificates(DOCS / "certificates")
    assert CPU.name in {one.platform for one in found}
    for one in found:
        assert one.is_hardware and one.passed, one.device
        assert list(one.checks) == [check.name for check in CHECKS], one.device


if __name__ == "__main__":
    page = DOCS / "platforms.md"
    before, _, rest = page.read_text().partition(START)
    table = support_table(read_certificates(DOCS / "certificates"))
    page.write_text(before + START + table + END + rest.partition(END)[2])
