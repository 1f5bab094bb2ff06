# SPDX-License-Identifier: Apache-2.0
"""Token ids and lengths against what a model's config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from tandem.cli.main import EXIT_USER_ERROR, main
from tandem.cli.plan import plan_arguments
from tandem.config.derived.trained_model import trained_model
from tandem.config.parse.overrides import load_config
from tandem.config.schema.families import NATIVE_FAMILIES
from tandem.config.schema.run import RunConfig
from tandem.driver.model_checks import (
    length_warnings,
    max_positions,
    position_warnings,
    require_end,
    require_known_tokens,
    require_local_family,
)
from tandem.errors import UserError
from tests.fakes.tiny_run import Material, sft_arguments, train_arguments

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("hf_config", "limit"),
    [
        ({}, None),
        ({"max_position_embeddings": 256}, 256),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 256, "rope_scaling": None}, 256),
        ({"max_position_embeddings": 256, "rope_parameters": {"rope_theta": 1e4}}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": {"type": "linear", "factor": 2}}, 512),
        ({"max_position_embeddings": 32768, "rope_parameters": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
    ],
)
def test_the_length_a_model_is_made_for(hf_config: dict[str, Any], limit: int | None) -> None:
    assert max_positions(hf_config) == limit


def test_a_longer_sequence_is_a_caution() -> None:
    config = {"max_position_embeddings": 256}
    assert position_warnings(config, 256, keys="a + b", model="m") == ()
    assert position_warnings({}, 1000, keys="a + b", model="m") == ()
    (caution,) = position_warnings(config, 257, keys="a + b", model="m")
    assert caution.startswith("a + b = 257 tokens: m is made for 256 positions")


def test_the_plan_warns_of_a_local_model_and_asks_for_no_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 600}))
    key = "actor_rollout_ref.model.path"
    warnings = plan_arguments([f"{key}={tmp_path}", "data.max_prompt_length=500"]).warnings
    said = [line for line in warnings if "positions" in line]
    assert said and said[0].startswith("data.max_prompt_length + data.max_response_length = 1012")
    fitting = ["data.max_prompt_length=500", "data.max_response_length=100"]
    warnings = plan_arguments([f"{key}={tmp_path}", *fitting]).warnings
    assert not [line for line in warnings if "positions" in line]
    assert plan_arguments([f"{key}=nobody/nothing"]).warnings


@pytest.mark.parametrize("command", ["plan", "plan sft", "train", "sft"])
def test_a_family_that_nobody_knows_is_refused(
    command: str, material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    is_sft = command.endswith("sft")
    key = "model.path" if is_sft else "actor_rollout_ref.model.path"
    spelling = "model.partial_pretrain" if is_sft else key  # as in the arguments before it
    arguments = (sft_arguments if is_sft else train_arguments)(material, tmp_path / "run")
    words = [*command.split(), *arguments[1:], f"{spelling}={tmp_path}"]
    assert main(words) == EXIT_USER_ERROR
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {key}='{tmp_path}': model_type 'perceptron' is unknown. Use one of "
        f"{', '.join(NATIVE_FAMILIES)}, or a family that transformers knows; transformers then "
        "generates the rollouts (actor_rollout_ref.rollout.name=hf)."
    )


def test_a_family_that_transformers_knows_is_known_without_loading_it() -> None:
    for family in CONFIG_MAPPING:
        require_local_family({"model_type": family}, key="k", path="p", trust_remote_code=False)
    own = {"model_type": "perceptron", "auto_map": {}}
    require_local_family(own, key="k", path="p", trust_remote_code=True)
    with pytest.raises(
        UserError, match=r"^k='p': model_type .*Set actor_rollout_ref.model.trust_rem"
    ):
        require_local_family(own, key="k", path="p", trust_remote_code=False)


def test_the_number_of_positions_can_be_replaced_unless_rotary_scaling_reads_it() -> None:
    key = "actor_rollout_ref.model.override_config.max_position_embeddings"
    keys = ["data.max_prompt_length=500", "data.max_response_length=500"]

    def warnings(hf_config: dict[str, Any], *arguments: str) -> tuple[str, ...]:
        config = load_config(RunConfig, [*keys, *arguments]).config
        return length_warnings(trained_model(config), hf_config)

    plain = {"max_position_embeddings": 512}
    assert warnings(plain)
    assert not warnings(plain, f"+{key}=1000")
    assert warnings(plain, f"{key}=999")
    with pytest.raises(UserError, match=r"max_position_embeddings=1000: the model scales .*yarn"):
        warnings({**plain, "rope_scaling": YARN}, f"{key}=1000")
    assert not warnings({**plain, "rope_scaling": YARN})
    flat = {"model_type": "qwen2_5_vl", **plain, "rope_scaling": {"type": "mrope"}}
    assert warnings(flat)
    assert not warnings(flat, f"{key}=1000")
    nested = {"model_type": "qwen3_vl", "text_config": {**plain, "rope_scaling": YARN}}
    with pytest.raises(UserError, match=r"max_position_embeddings=1000: the model scales .*yarn"):
        warnings(nested, f"{key}=1000")


def test_a_token_without_an_embedding_is_refused() -> None:
    ids = [np.array([1, 9], dtype=np.int32), np.array([], dtype=np.int32)]
    require_known_tokens(ids, {"vocab_size": 10}, path="p", key="model.path")
    require_known_tokens(ids, {}, path="p", key="model.path")
    with pytest.raises(UserError, match=r"model.path='p': its tokenizer gives token id 9.*only 9 "):
        require_known_tokens(ids, {"vocab_size": 9}, path="p", key="model.path")


def test_a_model_without_an_end_token_is_refused_unless_none_is_wanted() -> None:
    rollout, known = RunConfig().actor_rollout_ref.rollout, {"vocab_size": 8}
    model = trained_model(load_config(RunConfig, ["actor_rollout_ref.model.path=m"]).config)
    with pytest.raises(UserError, match=r"'m': neither its tokenizer nor .* names an end token"):
        require_end((), rollout, model=model, hf_config=known)
    with pytest.raises(UserError, match=r"'m': its end token 8 is none of its 8 tokens"):
        require_end((8, 9), rollout, model=model, hf_config=known)
    endless = rollout.model_copy(update={"ignore_eos": True})
    assert require_end((), endless, model=model, hf_config=known) == ()
    assert require_end((2,), rollout, model=model, hf_config=known) == ()
    assert require_end((9,), rollout, model=model, hf_config={}) == ()
    (caution,) = require_end((2, 9), rollout, model=model, hf_config=known)
    key = "actor_rollout_ref.model.path='m'"
    assert caution == f"{key}: the end token 9 is none of the model's 8 tokens (vocab_size)"
