# SPDX-License-Identifier: Apache-2.0
"""Which engine generates: by the name, the model's family, and what is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.plan import plan_arguments
from tandem.config.parse.overrides import LoadedConfig
from tandem.config.schema.families import NATIVE_FAMILIES
from tandem.config.schema.run import RunConfig
from tandem.driver.arguments import load_arguments, load_runnable
from tandem.driver.engine_choice import require_engine
from tandem.errors import UserError
from tandem.rollout.choice import PACKAGES
from tests.fakes.packages import install_vllm

ROLLOUT = "actor_rollout_ref.rollout"
NAME = f"{ROLLOUT}.name"
INSTALL = "pip install 'vllm>=0.24,<0.33'"
VERL = "--config-name=ppo_trainer"
QWEN2, GPT2, ODD = (
    {"model_type": family, "architectures": [f"{family.upper()}LMHeadModel"]}
    for family in ("qwen2", "gpt2", "git")
)
"""The config.json of a family that our decoder computes, and of two that it does not."""
is_without_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="has vllm")


def load(folder: Path, hf_config: dict[str, object], *arguments: str) -> LoadedConfig[RunConfig]:
    (folder / "config.json").write_text(json.dumps(hf_config))
    keys = (f"actor_rollout_ref.model.path={folder}", "trainer.n_gpus_per_node=1")
    return load_arguments(RunConfig, [*keys, "algorithm.adv_estimator=grpo", *arguments])


def chosen(loaded: LoadedConfig[RunConfig]) -> str:
    return loaded.config.actor_rollout_ref.rollout.name


def told(loaded: LoadedConfig[RunConfig]) -> list[str]:
    return [line for line in loaded.warnings if "generate" in line]


@is_without_vllm
def test_auto_is_native_or_transformers_without_vllm(tmp_path: Path) -> None:
    loaded = load(tmp_path, QWEN2)
    assert (chosen(loaded), told(loaded)) == ("native", [])
    loaded = load(tmp_path, GPT2)
    assert chosen(loaded) == "hf"
    (line,) = told(loaded)
    assert line == (
        "rollout by transformers' generate, which is slow on accelerators: the native engine "
        f"computes {', '.join(NATIVE_FAMILIES)} and not models of type 'gpt2', and vLLM is not "
        f"installed ({INSTALL}). Set {NAME}=hf if that is intended"
    )
    assert told(load(tmp_path, GPT2, f"{NAME}=hf")) == []


def test_auto_is_vllm_where_only_vllm_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install_vllm(tmp_path / "site", classes=GPT2["architectures"]))
    assert chosen(load(tmp_path, QWEN2)) == "native"
    loaded = load(tmp_path, GPT2)
    assert (chosen(loaded), told(loaded)) == ("vllm", [])
    loaded = load(tmp_path, ODD)
    assert chosen(loaded) == "hf"
    assert "vLLM 0.32.0 does not compute GITLMHeadModel. Set" in told(loaded)[0]


def test_vllm_with_the_classes_of_transformers_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = GPT2["architectures"]
    site = install_vllm(tmp_path / "site", classes=classes, module="transformers")
    monkeypatch.syspath_prepend(site)
    loaded = load(tmp_path, GPT2)
    assert chosen(loaded) == "hf"
    reason = f"vLLM 0.32.0 computes {classes[0]} with the classes of transformers, which it changes"
    assert reason in told(loaded)[0]
    with pytest.raises(UserError, match=reason):
        require_engine(load(tmp_path, GPT2, f"{NAME}=vllm").config, GPT2)


def test_auto_stays_for_a_model_that_is_not_here() -> None:
    assert chosen(load_arguments(RunConfig, ["actor_rollout_ref.model.path=some/model"])) == "auto"


@is_without_vllm
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vllm", f"vLLM is not installed. Install it with {INSTALL}, or leave the key out."),
        ("sglang", "SGLang is not installed. Install it with python -m venv .venv-sglang && "),
        ("trtllm", "tandem has no engine over TensorRT-LLM yet. Leave the key out"),
    ],
)
def test_a_named_engine_that_is_missing_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    arguments = [f"actor_rollout_ref.model.path={tmp_path}", f"{NAME}={name}"]
    with pytest.raises(UserError, match="^" + NAME) as caught:
        load_runnable(RunConfig, arguments)
    assert str(caught.value).startswith(f"{NAME}='{name}': {reason}")


def test_an_engine_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = load(tmp_path, GPT2, f"{NAME}=native").config
    with pytest.raises(UserError, match=r"the native engine does not compute .* 'gpt2'"):
        require_engine(native, GPT2)
    monkeypatch.syspath_prepend(install_vllm(tmp_path / "site", version="0.40.1"))
    with pytest.raises(UserError, match=r"vLLM 0.40.1 is installed, and >=0.24,<0.33 is supp"):
        require_engine(load(tmp_path, QWEN2, f"{NAME}=vllm").config)


SPLIT = "actor_rollout_ref.rollout.tensor_model_parallel_size"
DIVIDE = "actor_rollout_ref.rollout.expert_parallel_size"
DEVICES = "trainer.n_gpus_per_node"
APART = (
    "trainer.separated_node_tasks=[[actor-train,logp],[generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
    "trainer.nnodes=2",
)


@pytest.mark.parametrize(
    ("keys", "sizes", "reason"),
    [
        ((f"{SPLIT}=2",), {}, "it must divide the 1 device(s) that generate"),
        ((f"{SPLIT}=4", f"{DEVICES}=6"), {}, "it must divide the 6 device(s) that generate"),
        (
            (f"{SPLIT}=2", f"{DEVICES}=1", "trainer.nnodes=2"),
            {},
            "the devices of an engine must be on one node",
        ),
        (
            (f"{SPLIT}=2", f"{DEVICES}=2", *APART, f"{ROLLOUT}.enable_param_async=True"),
            {},
            "with enable_param_async or enable_dual_buffer an engine must be on one device",
        ),
        (
            (f"{SPLIT}=2", f"{DEVICES}=2"),
            {"num_attention_heads": 3},
            "it must divide the model's num_attention_heads, which is 3",
        ),
        (
            (f"{SPLIT}=2", f"{DEVICES}=2"),
            {"intermediate_size": 5},
            "it must divide the model's intermediate_size, which is 5",
        ),
        (
            (f"{SPLIT}=2", f"{DEVICES}=2"),
            {"num_key_value_heads": 3},
            "it must divide num_key_value_heads=3, or be a multiple of it",
        ),
        (
            (f"{SPLIT}=2", f"{DEVICES}=2"),
            {"model_type": "qwen3_moe", "moe_intermediate_size": 3},
            "it must divide the model's moe_intermediate_size, which is 3; "
            f"{DIVIDE}=2 divides the experts",
        ),
        (
            (f"{SPLIT}=2", f"{DEVICES}=2", f"{DIVIDE}=2"),
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 3},
            "it must divide the model's shared_expert_intermediate_size, which is 3",
        ),
    ],
)
def test_an_engine_that_cannot_be_divided_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    keys: tuple[str, ...],
    sizes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.syspath_prepend(install_vllm(tmp_path / "site", classes=QWEN2["architectures"]))
    fitting = {"num_attention_heads": 4, "intermediate_size": 8, "num_key_value_heads": 1}
    config = load(tmp_path, QWEN2, f"{NAME}=vllm", *keys).config
    with pytest.raises(UserError) as caught:
        require_engine(config, QWEN2 | fitting | sizes)
    split = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    assert f"{SPLIT}={split}: {reason}. Leave the key out" in str(caught.value)


def test_an_engine_may_be_divided_over_the_devices_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install_vllm(tmp_path / "site", classes=QWEN2["architectures"]))
    sizes = {"num_attention_heads": 4, "intermediate_size": 8, "num_key_value_heads": 1}
    config = load(tmp_path, QWEN2, f"{NAME}=vllm", f"{SPLIT}=2", f"{DEVICES}=4").config
    require_engine(config, QWEN2 | sizes)
    experts = {"model_type": "qwen3_moe", "moe_intermediate_size": 3}
    keys = (f"{NAME}=vllm", f"{SPLIT}=2", f"{DIVIDE}=2", f"{DEVICES}=4")
    require_engine(load(tmp_path, QWEN2, *keys).config, QWEN2 | sizes | experts)
    assert config.actor_rollout_ref.rollout.ranks_per_engine == 2
    native = load(tmp_path, QWEN2, f"{NAME}=native", f"{SPLIT}=2", f"{DEVICES}=4").config
    assert native.actor_rollout_ref.rollout.ranks_per_engine == 1


@is_without_vllm
def test_an_engine_that_verls_script_names_is_a_wish(tmp_path: Path) -> None:
    loaded = load(tmp_path, QWEN2, VERL, f"{NAME}=vllm")
    assert chosen(loaded) == "native"
    assert told(loaded) == [
        f"{NAME}=vllm: vLLM is not installed, so tandem's native engine generates. To use it: "
        f"{INSTALL}"
    ]
    loaded = load(tmp_path, GPT2, VERL, f"{NAME}=sglang")
    assert chosen(loaded) == "hf"
    assert told(loaded) == [
        f"{NAME}=sglang: SGLang is not installed, so transformers' generate generates. To use it: "
        f"{PACKAGES['sglang'].install}"
    ]
    unknown = load_arguments(RunConfig, [VERL, "algorithm.adv_estimator=grpo", f"{NAME}=vllm"])
    assert chosen(unknown) == "auto"
    assert "so the engine that suits the model's family generates" in told(unknown)[0]


def test_verls_script_gets_vllm_if_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install_vllm(tmp_path / "site", classes=QWEN2["architectures"]))
    loaded = load(tmp_path, QWEN2, VERL, f"{NAME}=vllm")
    assert (chosen(loaded), told(loaded)) == ("vllm", [])


@is_without_vllm
def test_the_plan_names_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    plan = plan_arguments([f"actor_rollout_ref.model.path={tmp_path}"])
    assert plan.run["rollout engine"] == "native"
