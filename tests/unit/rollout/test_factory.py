# SPDX-License-Identifier: Apache-2.0
"""Which engine serves which model, and the native engine against transformers on a real folder."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers

from tandem.api import Rollout, RolloutEngine
from tandem.config.schema.rollout import NATIVE_NAMES, RolloutConfig
from tandem.errors import UserError
from tandem.models.adapted import AdapterConfig
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.platforms.record import CPU, Platform
from tandem.rollout.factory import (
    EngineSpec,
    build_engine,
    require_decoder,
    require_quantization,
    require_recording,
)
from tandem.rollout.feed import FedRollout, WeightFeed
from tandem.rollout.hf import HfRolloutEngine
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.types import GenerationRequest, SamplingParams
from tests.fakes.tiny_decoder import CONFIG

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=12)
PROMPTS = ((5, 6, 7, 8), (11, 12), (20, 21, 22, 23, 24, 25, 26))


@pytest.fixture(scope="module")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 whose greedy continuations vary."""
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("qwen2")
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def _build(
    model: LanguageModel,
    config: RolloutConfig,
    *,
    eos_ids: tuple[int, ...] = (0,),
    platform: Platform = CPU,
) -> RolloutEngine:
    return build_engine(EngineSpec(model, Path(), config, eos_ids, platform))


def test_our_families_run_natively(qwen2_folder: Path) -> None:
    model = open_model(str(qwen2_folder), dtype=torch.float32, device="cpu")
    for name in ("native", "auto"):
        engine = _build(model, RolloutConfig(name=name), eos_ids=(0,), platform=CPU)
        assert isinstance(engine, NativeRolloutEngine)


def test_transformers_generates_for_our_families_if_it_is_named(qwen2_folder: Path) -> None:
    model = open_model(str(qwen2_folder), dtype=torch.float32, device="cpu")
    model.module.requires_grad_(False)
    spec = EngineSpec(model, qwen2_folder, RolloutConfig(name="hf"), (0,), CPU)
    engine = build_engine(spec)
    assert isinstance(engine, HfRolloutEngine)
    sink = engine.sink()
    assert sink is not None
    rollout = FedRollout(engine, WeightFeed(model, sink))
    rollout.set_weights_version(0)
    native = _build(model, RolloutConfig())
    requests = [GenerationRequest((0, 1), PROMPTS[0], replace(GREEDY, temperature=1.0))]
    found, expected = (_tokens(one, requests) for one in (rollout, native))
    assert found == expected


def test_transformers_generates_for_models_of_our_families_that_we_do_not_compute(
    qwen2_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(qwen2_folder, tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text()) | {"hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(content))
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    spec = EngineSpec(model, folder, RolloutConfig(), (0,), CPU)
    assert isinstance(build_engine(spec), HfRolloutEngine)
    with pytest.raises(UserError, match="rollout.name='native': .* Set it to hf, and transformers"):
        require_decoder(RolloutConfig(name="native"), None, model="m")
    require_decoder(RolloutConfig(), None, model="m")


def _tokens(rollout: Rollout, requests: list[GenerationRequest]) -> dict[int, list[int]]:
    rollout.add(requests)
    found: dict[int, list[int]] = {}
    while completions := rollout.advance():
        found |= {one.sample_id: list(one.token_ids) for one in completions}
    return found


@pytest.mark.parametrize("partial_rollout", [True, "keep_cache"])
def test_what_is_cached_is_kept_on_demand(
    qwen2_folder: Path, partial_rollout: Literal[True, "keep_cache"]
) -> None:
    model = open_model(str(qwen2_folder), dtype=torch.float32, device="cpu")
    config = RolloutConfig(partial_rollout=partial_rollout)
    engine = _build(model, config, eos_ids=(0,), platform=CPU)
    assert isinstance(engine, NativeRolloutEngine)
    engine.add([GenerationRequest((0,), PROMPTS[0], GREEDY)])
    engine.advance(max_steps=3)
    before = engine.num_prefilled_tokens
    engine.set_weights_version(1)
    engine.advance(max_steps=1)
    assert (engine.num_prefilled_tokens == before) == (partial_rollout == "keep_cache")


def test_other_families_run_by_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.GPT2Config(vocab_size=24, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = open_model(str(tmp_path), dtype=torch.float32, device="cpu")
    engine = _build(model, RolloutConfig(), eos_ids=(0,), platform=CPU)
    assert isinstance(engine, HfRolloutEngine)
    engine.add([GenerationRequest((0,), (5, 6), GREEDY)])
    assert [completion.sample_id for completion in engine.advance()] == [0]
    device = replace(CPU, has_own_memory=True)
    for platform in (CPU, device):
        _build(model, RolloutConfig(name="hf"), eos_ids=(0,), platform=platform)
    said = [record for record in caplog.records if record.name == "tandem.rollout.factory"]
    assert [record.levelname for record in said] == ["WARNING"]
    assert "and not models of type 'gpt2'" in said[0].getMessage()
    assert (
        said[0].getMessage().endswith("Set actor_rollout_ref.rollout.name=hf if that is intended")
    )


def test_greedy_equals_transformers_generate(qwen2_folder: Path) -> None:
    model = open_model(str(qwen2_folder), dtype=torch.float32, device="cpu")
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(qwen2_folder)
    settings = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = [
        theirs.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    assert len({tuple(row.tolist()) for row in expected}) == len(PROMPTS)
    for eos_ids in ((63,), (int(expected[0][4]), 63)):
        engine = _build(model, RolloutConfig(), eos_ids=eos_ids, platform=CPU)
        engine.add([GenerationRequest((i,), p, GREEDY) for i, p in enumerate(PROMPTS)])
        finished = {}
        while completions := engine.advance():
            finished |= {completion.sample_id: completion for completion in completions}
        for i, row in enumerate(expected):
            ends = [j for j, token in enumerate(row.tolist()) if token in eos_ids]
            length = ends[0] + 1 if ends else 12
            assert list(finished[i].token_ids) == row[:length].tolist()


def test_sampling_settings_reach_the_engine(qwen2_folder: Path) -> None:
    model = open_model(str(qwen2_folder), dtype=torch.float32, device="cpu")
    sampling = replace(GREEDY, temperature=1.0)
    tokens = []
    for seed in (1, 1, 2):
        engine = _build(model, RolloutConfig(seed=seed, max_num_seqs=1), eos_ids=(0,), platform=CPU)
        engine.add([GenerationRequest((0, 1), PROMPTS[0], sampling)])
        assert len(first := engine.advance()) == 1
        tokens.append(first[0].token_ids)
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    ("changes", "platform", "is_ours", "reason"),
    [
        ({}, replace(CPU, has_fp8=lambda: False), True, "does not multiply fp8"),
        ({"name": "pack.engine:build"}, CPU, True, "vLLM and the native engine generate in it"),
        ({"name": "hf"}, CPU, True, "vLLM and the native engine generate in it, not rollout.name"),
        ({"name": "vllm"}, CPU, True, r"it would be in float32 .*dtype\). Set .*dtype=bfloat16"),
        (
            {"name": "vllm", "engine_kwargs": {"vllm": {"urls": ["http://a:1"]}}},
            CPU,
            True,
            "servers are attached",
        ),
        ({}, CPU, False, "transformers generates"),
    ],
)
def test_fp8_is_refused_where_nothing_computes_it(
    changes: dict[str, Any], platform: Platform, is_ours: bool, reason: str
) -> None:
    config = RolloutConfig.model_validate({"quantization": "fp8", **changes})
    decoder = CONFIG if is_ours else None
    with pytest.raises(UserError, match=reason):
        require_quantization(config, decoder, platform=platform, dtype=torch.float32)
    unquantized = config.model_copy(update={"quantization": None})
    require_quantization(unquantized, decoder, platform=platform, dtype=torch.float32)


def test_vllm_quantizes_models_in_16_bits() -> None:
    """It decides itself which devices and families it quantizes."""
    config = RolloutConfig.model_validate({"quantization": "fp8", "name": "vllm"})
    require_quantization(config, None, platform=CPU, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="fp8"):
        require_quantization(config, None, platform=CPU, dtype=torch.float32)
    explicit = config.model_copy(update={"dtype": "float16"})
    require_quantization(explicit, None, platform=CPU, dtype=torch.float32)


@pytest.mark.parametrize("name", ["auto", "native", "hf", "sglang"])
def test_fp8_with_adapters_is_the_native_engines(name: str) -> None:
    """vLLM is refused with the configuration (``unit/config/test_adapters.py``)."""
    adapted = replace(CONFIG, adapters=AdapterConfig(2, 4.0, False, maps=()))
    config = RolloutConfig.model_validate({"quantization": "fp8", "name": name})
    is_native = name in NATIVE_NAMES
    with nullcontext() if is_native else pytest.raises(UserError, match=f"rollout.name={name}"):
        require_quantization(config, adapted, platform=CPU, dtype=torch.bfloat16)


def test_fp8_is_built_where_it_is_asked_for(qwen2_folder: Path) -> None:
    model = open_model(str(qwen2_folder), dtype=torch.float32, device="cpu")
    request = GenerationRequest((0,), PROMPTS[0], replace(GREEDY, ignore_eos=True))
    log_probs = []
    for quantization in (None, "fp8"):
        engine = _build(model, RolloutConfig(quantization=quantization))
        engine.add([request])
        (completion,) = engine.advance()
        log_probs.append(completion.log_probs[0])
    assert log_probs[0] != log_probs[1]
    assert log_probs[0] == pytest.approx(log_probs[1], abs=0.3)


@pytest.mark.parametrize("name", ["vllm", "sglang", "hf"])
def test_mo7_engines_that_record_no_experts_are_refused(name: str) -> None:
    recording = {"name": name, "enable_rollout_routing_replay": True}
    config = RolloutConfig.model_validate(recording)
    with pytest.raises(UserError, match=f"rollout.name={name} does not record the experts"):
        require_recording(config)
    native = config.model_copy(update={"name": "native"})
    require_recording(native)
