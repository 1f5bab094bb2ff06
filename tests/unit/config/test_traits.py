# SPDX-License-Identifier: Apache-2.0
"""Estimators and losses are chosen by a built-in name or by a dotted path to a user's function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tandem.algorithms.advantages import ADVANTAGES
from tandem.algorithms.losses import POLICY_LOSSES
from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.check.rules import check_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.actor import LOSSES, Loss
from tandem.config.schema.algorithm import ESTIMATORS, Estimator
from tandem.config.schema.imports import import_dotted, import_function, is_dotted
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def plain(inputs: object, settings: object) -> None:
    """A function without traits."""


def with_traits(traits: object) -> Callable[[], None]:
    """A function with traits."""

    def function(inputs: object, settings: object) -> None: ...

    function.traits = traits  # pyright: ignore[reportFunctionMemberAccess]
    return function


@pytest.fixture
def module() -> str:
    """The name of an importable module with functions of a user."""
    made = ModuleType("tandem_test_users_functions")
    made.plain = plain  # pyright: ignore[reportAttributeAccessIssue]
    made.critic = with_traits(Estimator(needs_values=True, reads=("lam",)))  # pyright: ignore
    made.sequences = with_traits(Loss(is_sequence_level=True, reads=()))  # pyright: ignore
    sys.modules[made.__name__] = made
    yield made.__name__
    del sys.modules[made.__name__]


def test_every_built_in_name_is_computed() -> None:
    assert set(ESTIMATORS) == set(ADVANTAGES)
    assert set(LOSSES) == set(POLICY_LOSSES)


@pytest.mark.parametrize("key", [ESTIMATOR, LOSS])
@pytest.mark.parametrize("value", ["gaee", "package.module", "package.module:", ":f", "a-b:f"])
def test_another_name_is_refused_with_the_names_and_the_form(key: str, value: str) -> None:
    with pytest.raises(UserError, match="must be one of .*gpg.*package.module:function") as caught:
        load_config(RunConfig, [f"{key}='{value}'"])
    assert str(caught.value).startswith(f"{key}={value!r}: ")


def test_a_users_function_has_default_traits_unless_it_says_otherwise(module: str) -> None:
    def run(*arguments: str) -> RunConfig:
        return load_config(RunConfig, arguments).config

    assert run(f"{ESTIMATOR}={module}:plain").algorithm.estimator == Estimator()
    assert not run(f"{ESTIMATOR}={module}:plain").uses_critic
    assert run(f"{ESTIMATOR}={module}:critic").uses_critic
    policy_loss = run(f"{LOSS}={module}:sequences").actor_rollout_ref.actor.policy_loss
    assert policy_loss.traits.is_sequence_level
    with pytest.raises(UserError, match="'traits' must be a tandem.config.schema.actor.Loss"):
        check_run(run(f"{LOSS}={module}:critic"))


def test_the_traits_say_which_keys_are_read(module: str) -> None:
    def ignored(*arguments: str) -> list[str]:
        return list(ignored_keys(load_config(RunConfig, arguments)))

    keys = ("algorithm.gamma=0.9", "algorithm.lam=0.9")
    assert ignored(f"{ESTIMATOR}={module}:plain", *keys) == []
    assert ignored(f"{ESTIMATOR}={module}:critic", *keys) == ["algorithm.gamma"]


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("tandem_no_such_module:f", "cannot be imported"),
        ("tandem.errors:no_such_function", "has no attribute 'no_such_function'"),
        ("tandem.errors:NO_VALUE", "is neither a class nor a function"),
        ("broken_module_of_tests:f", "does not import: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_imported_is_refused_in_one_line(
    path: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module_of_tests.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(RunConfig, [f"{ESTIMATOR}={path}"]).config
    with pytest.raises(UserError, match=rule) as caught:
        check_run(config)
    assert (caught.value.key, caught.value.value) == (ESTIMATOR, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("os.path:basename", r"cannot be called with \(inputs, settings\): too many positional"),
        ("shutil:move", ""),
        ("builtins:max", ""),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused(path: str, rule: str) -> None:
    """A function of C may have no signature, and a third argument a default."""
    if not rule:
        assert callable(import_function("key", path, arguments=("inputs", "settings")))
        return
    with pytest.raises(UserError, match=rule) as caught:
        check_run(load_config(RunConfig, [f"{ESTIMATOR}={path}"]).config)
    assert caught.value.remedy == "Define it as basename(inputs, settings)."


def test_a_dotted_path_names_an_object() -> None:
    assert is_dotted("a.b:c") and not is_dotted("a.b.c") and not is_dotted("grpo")
    assert import_dotted("key", "tandem.errors:UserError") is UserError
