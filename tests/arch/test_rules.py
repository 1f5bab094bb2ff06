# SPDX-License-Identifier: Apache-2.0
"""The house rules, each one a function from all modules to its violations, less the exemptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest

from tests.arch.exemptions import FILE, MAX_EXEMPTIONS, read_exemptions
from tests.arch.rules import (
    classes,
    devices,
    failures,
    imports,
    names,
    prose,
    settings,
    sizes,
    testing,
)
from tests.arch.source import Module, Violation, project_modules

Rule = Callable[[Sequence[Module]], Iterator[Violation]]

RULES: dict[str, Rule] = {
    "7-file-length": sizes.file_length,
    "7-definition-length": sizes.definition_length,
    "7-median-body": sizes.median_body,
    "7-imported-names": sizes.imported_names,
    "7-nesting": sizes.nesting,
    "7-branches": sizes.branches,
    "8-parameters": sizes.parameters,
    "8-open-parameters": sizes.open_parameters,
    "10-inheritance": classes.inheritance_depth,
    "11-empty-names": names.empty_names,
    "12-import-table": imports.import_table,
    "12-outside-imports": imports.outside_imports,
    "13-import-position": imports.import_position,
    "13-one-adapter": imports.one_adapter,
    "14-package-owners": imports.package_owners,
    "15-import-effects": imports.import_effects,
    "19-config-defaults": settings.config_defaults,
    "23-environment": settings.environment_reads,
    "27-version-names": names.version_names,
    "39-vendor-names": devices.vendor_names,
    "41-silent-asserts": failures.silent_asserts,
    "42-broad-except": failures.broad_except,
    "43-console-output": failures.console_output,
    "43b-plain-docstrings": prose.plain_docstrings,
    "43b-plain-words": prose.plain_words,
    "44-ascii": names.ascii_only,
    "46-spdx": names.spdx_line,
    "2-module-docstring": names.module_docstring,
    "2-empty-packages": names.empty_packages,
    "47-test-classes": testing.no_test_classes,
    "47-mocks": testing.no_mocks,
    "47-test-packages": testing.no_test_packages,
    "47-asserting-tests": testing.asserting_tests,
}


@cache
def violations(rule: str) -> tuple[Violation, ...]:
    """What a rule finds in the project, exempted or not."""
    return tuple(RULES[rule](project_modules()))


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    exempted = {exemption.place for exemption in read_exemptions() if exemption.rule == rule}
    left = [violation for violation in violations(rule) if violation.place not in exempted]
    lines = "\n".join(f"  {violation.place}: {violation.message}" for violation in left)
    text = " ".join((RULES[rule].__doc__ or "").split())
    assert not left, f"{rule}: {len(left)} violation(s). {text}\n{lines}"


def test_exemptions_are_few_reasoned_and_used() -> None:
    exemptions = read_exemptions()
    assert len(exemptions) <= MAX_EXEMPTIONS, f"{FILE.name}: {len(exemptions)} entries"
    for exemption in exemptions:
        assert exemption.rule in RULES, f"{FILE.name}: no rule {exemption.rule!r}"
        assert len(exemption.reason.split()) >= 4, f"{FILE.name}: {exemption.place}: say why"
        places = {violation.place for violation in violations(exemption.rule)}
        assert exemption.place in places, f"{FILE.name}: stale: {exemption.rule} {exemption.place}"
    pairs = [(exemption.rule, exemption.place) for exemption in exemptions]
    assert len(pairs) == len(set(pairs)), f"{FILE.name}: an entry stands twice"
