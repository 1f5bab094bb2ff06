# SPDX-License-Identifier: Apache-2.0
"""``rollout.name=sglang``: where SGLang is, and what ``engine_kwargs.sglang`` may hold."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.check.rules import check_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver.engine_choice import require_engine
from tandem.errors import UserError
from tandem.platforms.record import CPU
from tandem.rollout.factory import require_devices
from tandem.rollout.sglang.keys import check_sglang_arguments, interpreter
from tests.fakes.packages import install_sglang

ROLLOUT = "actor_rollout_ref.rollout"
KWARGS = f"{ROLLOUT}.engine_kwargs.sglang"
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
COMMAND = (
    "python -m venv .venv-sglang && .venv-sglang/bin/pip install 'sglang==0.5.23' and set "
    f"{KWARGS}.python=.venv-sglang/bin/python"
)


def _config(*keys: str) -> RunConfig:
    named = ["actor_rollout_ref.model.path=a/b", f"{ROLLOUT}.name=sglang", *keys]
    return load_config(RunConfig, named).config


def _refused(config: RunConfig, hf_config: Mapping[str, object]) -> str:
    with pytest.raises(UserError) as caught:
        require_engine(config, hf_config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_engine_over_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process returns what its engine draws if it is the first of the engine."""
    monkeypatch.syspath_prepend(install_sglang(tmp_path))
    split = f"{ROLLOUT}.tensor_model_parallel_size=2"
    config = _config(split, "trainer.n_gpus_per_node=4", "trainer.device=cpu")
    sizes = {"num_attention_heads": 4, "intermediate_size": 8, "num_key_value_heads": 1}
    require_engine(config, QWEN2 | sizes)
    rollout = config.actor_rollout_ref.rollout
    assert [rollout.answers(rank) for rank in range(4)] == [True, False, True, False]
    message = f"{ROLLOUT}.name='sglang': {split}: it must divide the model's num_attention_heads"
    assert message in _refused(config, QWEN2 | {"num_attention_heads": 3})
    experts = {"model_type": "qwen3_moe"}  # of Qwen2's class, which this SGLang has
    message = "with experts, an engine of SGLang must be on one device"
    assert message in _refused(config, QWEN2 | experts)
    elsewhere = _config(split, "trainer.n_gpus_per_node=4")
    message = "an engine of SGLang over several devices is built for trainer.device=cpu"
    assert message in _refused(elsewhere, QWEN2 | sizes)
    require_devices(rollout, CPU)
    with pytest.raises(UserError, match="SGLang, an engine over several devices is built for CPUs"):
        require_devices(rollout, replace(CPU, device_type="cuda"))


@pytest.mark.skipif(find_spec("sglang") is not None, reason="has sglang")
def test_sglang_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert f"SGLang is not installed. Install it with {COMMAND}, or" in _refused(_config(), QWEN2)
    here = _config(f"{KWARGS}.python={sys.executable}")
    assert "SGLang is not installed" in _refused(here, QWEN2)
    absent = _config(f"{KWARGS}.python={tmp_path}/no/python")
    assert f"the interpreter {tmp_path}/no/python does not run" in _refused(absent, QWEN2)
    for value in ("3.12", "[a,b]"):
        wrong = _refused(_config(f"{KWARGS}.python={value}"), QWEN2)
        assert wrong.startswith(f"{KWARGS}.python={value}: must be the path of an interpreter")
    other = _config(f"{KWARGS}.python=/bin/true")
    assert "/bin/true does not run (it is not a Python interpreter)" in _refused(other, QWEN2)


def test_an_sglang_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install_sglang(tmp_path, version="0.4.9"))
    message = "SGLang 0.4.9 is installed, and ==0.5.23 is supported. Install it with python -m"
    assert message in _refused(_config(), QWEN2)
    doubtful = _config(f"{KWARGS}.allow_untested=maybe")
    assert message in _refused(doubtful, QWEN2)
    allowed = _config(f"{KWARGS}.allow_untested=True")
    require_engine(allowed, QWEN2)
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    assert "SGLang 0.4.9 does not compute GPT2LMHeadModel" in _refused(allowed, gpt2)
    short = QWEN2 | {"max_position_embeddings": 1023}
    assert "SGLang computes at most the 1023 positions" in _refused(allowed, short)
    require_engine(
        _config(f"{KWARGS}.allow_untested=True", "actor_rollout_ref.model.lora_rank=8"), QWEN2
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sampling_backend", "flashinfer", "is set by tandem: tandem draws the tokens"),
        ("enable_deterministic_inference", True, "is set by tandem: tandem draws the tokens"),
        ("preferred_sampling_params", {"top_k": 1}, "sampling follows the keys of the run"),
        ("incremental_streaming_output", True, "is set by tandem: tandem reads all tokens"),
        ("enable_lmcache", True, "is set by tandem: a cache outside of the device may keep"),
        ("custom_weight_loader", ["a.b"], "is set by tandem: tandem gives SGLang its weights"),
        ("disable_overlap_schedule", False, "is set by tandem: each token must have the version"),
        ("port", 30000, "is set by tandem: SGLang runs as a child of tandem's process"),
        ("quantization", "fp8", "is set by tandem: with SGLang, neither is built"),
        ("max_running_requests", 4, f"has a key of its own. Set {ROLLOUT}.max_num_seqs instead."),
        ("context_length", 4, "Set data.max_prompt_length and data.max_response_length instead."),
        ("page_sise", 4, "is no argument of SGLang's ServerArgs. Nearest: page_size."),
        ("zzz", 4, "is no argument of SGLang's ServerArgs. Leave it out."),
        ("page_size", "four", "must be an integer. Correct it, or leave it out."),
    ],
)
def test_what_sglang_does_not_take_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, message: str
) -> None:
    monkeypatch.syspath_prepend(install_sglang(tmp_path))
    given = {"page_size": 4, "python": None, "allow_untested": True}
    check_sglang_arguments(given)
    with pytest.raises(UserError) as caught:
        check_sglang_arguments(given | {name: value})
    assert str(caught.value).startswith(f"{KWARGS}.{name}=")
    assert message in str(caught.value)


def test_the_interpreter_is_this_one_unless_another_is_named() -> None:
    assert interpreter({}) == sys.executable
    assert interpreter({"python": "/opt/python"}) == "/opt/python"


def test_restarts_have_an_effect_on_engines_with_processes_and_on_workers_that_only_generate() -> (
    None
):
    key = f"{ROLLOUT}.max_engine_restarts"
    apart = ["actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2"]
    for name in ("native", "hf", "vllm"):
        keys = [f"{key}=2", f"{ROLLOUT}.name={name}"]
        loaded = load_config(RunConfig, keys)
        reason = "the engine has no processes of its own, and no worker only generates"
        assert ignored_keys(loaded) == {key: reason}
        assert not loaded.config.actor_rollout_ref.rollout.restarts_engine
        assert key not in ignored_keys(load_config(RunConfig, [*keys, *apart]))
    for name in ("sglang", "my_package.engine:build"):
        loaded = load_config(RunConfig, [f"{key}=2", f"{ROLLOUT}.name={name}"])
        assert ignored_keys(loaded) == {}
        assert loaded.config.actor_rollout_ref.rollout.restarts_engine


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (["enable_param_async=True"], "while enable_param_async or enable_dual_buffer sends"),
        (["enable_dual_buffer=True"], "while enable_param_async or enable_dual_buffer sends"),
        (["name=vllm", "tensor_model_parallel_size=2"], "an engine over several devices"),
    ],
)
def test_workers_that_cannot_be_replaced_are_refused(keys: list[str], rule: str) -> None:
    apart = ["actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=4"]
    own = [f"{ROLLOUT}.{key}" for key in keys]
    given = ["data.train_files=some", *apart, *own]
    check_run(load_config(RunConfig, given).config)
    with pytest.raises(UserError, match="max_engine_restarts=2: a worker") as caught:
        check_run(load_config(RunConfig, [*given, f"{ROLLOUT}.max_engine_restarts=2"]).config)
    assert rule in str(caught.value)
