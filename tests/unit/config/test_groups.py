# SPDX-License-Identifier: Apache-2.0
"""Hydra's groups of verl's configurations."""

from __future__ import annotations

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError


def test_the_built_option_of_a_group_is_what_the_section_is() -> None:
    groups = ["engine=fsdp", "optim=fsdp", "model=hf_model"]
    loaded = load_config(SftConfig, [*groups, "optim.lr=1e-4"])
    assert loaded.config == load_config(SftConfig, ["optim.lr=1e-4"]).config
    assert list(loaded.set_keys) == ["optim.lr"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("engine=megatron", r"^engine='megatron': Megatron is not built. Set engine=fsdp\.$"),
        ("engine=veomni", "VeOmni is not built"),
        ("optim=automodel", "automodel is not built. Set optim=fsdp"),
        ("engine=fdsp", "is a section, not a key"),
    ],
)
def test_another_option_is_refused_by_name(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(SftConfig, [argument])
