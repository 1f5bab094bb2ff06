# SPDX-License-Identifier: Apache-2.0
"""The keys that choose a capability of verl that is not built: each with its harmless values.

A harmless value leaves training as it is, so the key is accepted without effect. Any other value is
refused, because the run would train something else than was asked for. The keys below a section of
this table are read only by the capability and stand in ``schema.ignored``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A capability that is not built.

    Attributes:
        capability: the name of the capability, as a subject of "is not built".
        harmless: the values that do not ask for it; the first one is verl's default.
        remedy: the way to the same aim, if there is one; "" for leaving the key out.
        same_as: a key whose value is harmless here, too; "" for none.
        idle_with: a key of the same section and its value with which no value asks for the
            capability; empty for none.
    """

    capability: str
    harmless: tuple[Any, ...] = (False, None)
    remedy: str = ""
    same_as: str = ""
    idle_with: tuple[str, ...] = ()


_QAT = Unbuilt("quantization-aware training")
_ROUTER = Unbuilt("replay of a router's choices", ("disabled", None))
_DORA = Unbuilt(
    "an adapter of another kind than LoRA", ("lora", "canonical_lora", "vlm_lora", None)
)
_LORA_DROPOUT = Unbuilt("dropout of adapters", (0, None))
_MTP = Unbuilt("multi-token prediction")
_ENGINE = Unbuilt("a training engine other than FSDP", ("fsdp", "fsdp2", None))
_LATE_SCHEDULE = Unbuilt("a learning rate schedule that counts from 1", (True, None))
_RECORDED = Unbuilt("training on recorded rollouts")
_AGENT_MANAGER = Unbuilt(
    "a manager of agents of your own", (None,), "Name agents in agent.agent_loop_config_path."
)
_SERVED_MODEL = Unbuilt(
    "a reward model behind a server", (None,), "Name the model in reward_model.model.path."
)
_OWN_MANAGER = "a class of your own as reward manager"
_SCORE = "Compute the score in custom_reward_function.path."
_FSDP_SECTION = {"qat.enable": _QAT, "strategy": _ENGINE}
_DROPOUT = Unbuilt("dropout", (0, None))
_OTHER_CONFIG = "Change config.json in a copy of the model's folder."
_MODEL_SECTION = {
    "lora.type": _DORA,
    "lora.dropout": _LORA_DROPOUT,
    "target_parameters": Unbuilt("adapters of raw parameters", (None, [])),
    "mtp.enable": _MTP,
    "external_lib": Unbuilt("the import of a module before the model", (None,)),
    "hf_config_path": Unbuilt("a config.json from another folder", (None,), _OTHER_CONFIG),
    "tokenizer_path": Unbuilt(
        "a tokenizer from another folder than the policy",
        (None,),
        same_as="actor_rollout_ref.model.path",
    ),
    "override_config": Unbuilt("a change of the model's config.json", ({}, None), _OTHER_CONFIG),
    **{
        f"override_config.{key}": _DROPOUT
        for key in (
            "attention_dropout",
            "attn_pdrop",
            "embd_pdrop",
            "hidden_dropout",
            "resid_pdrop",
        )
    },
}
_OPTIM_SECTION = {
    "zero_indexed_step": _LATE_SCHEDULE,
    "optimizer_impl": Unbuilt("an optimizer of another package", ("torch.optim", None)),
    "override_optimizer_config": Unbuilt("another argument of the optimizer", ({}, None)),
    "override_optimizer_config.decoupled_weight_decay": Unbuilt(
        "a weight decay that is part of the gradient", (True, None)
    ),
    "lr_decay_style": Unbuilt(
        "a schedule of the learning rate by Megatron's keys",
        ("constant", None),
        "Set lr_scheduler_type=cosine and min_lr in the same section.",
    ),
    "lr_decay_steps": Unbuilt(
        "a learning rate that has fallen before the run ends",
        (None,),
        "Leave it out, and the rate falls over the whole run.",
        idle_with=("lr_scheduler_type", "constant"),
    ),
    "lr_warmup_init": Unbuilt("a warm-up that does not begin at 0", (0, None)),
    "weight_decay_incr_style": Unbuilt("a weight decay that changes", ("constant", None)),
}
_OWN_CLASS = ("path", "name", "class_path", "class_name")
_ORDER = "an order of rows other than that of the files or, with data.shuffle=True, a random one"
_OWN_SAMPLER = Unbuilt(_ORDER, (None,), "Order the rows of the files.")
_RANDOM_SAMPLER = {
    "class_name": replace(_OWN_SAMPLER, harmless=(None, "RandomCurriculumSampler")),
    "class_path": replace(
        _OWN_SAMPLER, harmless=(None, "pkg://tests.utils.dataset.test_create_rl_sampler_on_cpu")
    ),
}
"""verl's examples name a class of verl's tests, which draws rows in random order."""
_OWN_GENERATOR = Unbuilt("generation of training rows", (None,))

_ROLES: Mapping[str, Mapping[str, Unbuilt]] = {
    "data": {
        "video_key": Unbuilt("training on videos", ("videos", None)),
        "audio_key": Unbuilt("training on sound", ("audios", None)),
        **{f"sampler.{key}": _RANDOM_SAMPLER.get(key, _OWN_SAMPLER) for key in _OWN_CLASS},
        **{f"datagen.{key}": _OWN_GENERATOR for key in _OWN_CLASS},
    },
    "algorithm": {
        "use_pf_ppo": Unbuilt("PF-PPO, which draws samples by their reward"),
        "rollout_is": Unbuilt(
            "the correction by the names that verl 0.6.0 alone has",
            remedy="Set algorithm.rollout_correction.rollout_is=token (or sequence) and "
            "rollout_is_threshold=2.0 in the same section.",
        ),
    },
    "actor_rollout_ref.model": _MODEL_SECTION,
    "actor_rollout_ref.actor.fsdp_config": _FSDP_SECTION,
    "actor_rollout_ref.actor.optim": _OPTIM_SECTION,
    "actor_rollout_ref.actor": {"qat.enable": _QAT},
    "actor_rollout_ref.ref.fsdp_config": _FSDP_SECTION,
    "actor_rollout_ref.ref": {
        "model": Unbuilt("a reference that is another model than the actor", ({}, None)),
        "router_replay.mode": _ROUTER,
    },
    "actor_rollout_ref.rollout": {
        "agent.agent_loop_manager_class": _AGENT_MANAGER,
        "logprobs_mode": Unbuilt(
            "a log-prob other than that of the drawn distribution", ("processed_logprobs", None)
        ),
        "standalone_gpu_memory_utilization": Unbuilt(
            "a share of memory for some of the devices that generate",
            (None,),
            "Set gpu_memory_utilization in the same section, which is for all of them.",
        ),
        "skip_rollout": _RECORDED,
        "skip.enable": _RECORDED,
        "repetition_penalty": Unbuilt("a penalty for tokens that were drawn before", (1.0, None)),
    },
    "critic.model": {
        **_MODEL_SECTION,
        "rope_scaling": Unbuilt("a change of positions", ({}, None)),
    },
    "critic.model.fsdp_config": _FSDP_SECTION,
    "critic.optim": _OPTIM_SECTION,
    "reward_model.model": _MODEL_SECTION,
    "reward_model": {
        "sandbox_fusion.url": Unbuilt("a sandbox for reward code", (None,)),
        "model_path": _SERVED_MODEL,
        "reward_loop_source": Unbuilt(_OWN_MANAGER, ("register", None), _SCORE),
        "reward_loop_module_path": Unbuilt(_OWN_MANAGER, (None,), _SCORE),
        "reward_loop_class_name": Unbuilt(_OWN_MANAGER, ("custom_reward_manager", None), _SCORE),
    },
}
UNBUILT_RUN: Mapping[str, Unbuilt] = {
    **{f"{role}.{key}": entry for role, table in _ROLES.items() for key, entry in table.items()},
    "distillation.enabled": Unbuilt("distillation from a teacher"),
    "model_engine": Unbuilt(
        "a training engine other than FSDP (MindSpeed, TorchTitan, VeOmni)", ("dp", None)
    ),
    **{f"skip.{kind}.enable": _RECORDED for kind in ("rollout", "async_rollout", "rollout_tq")},
    "trainer.v1.sampler.custom_sampler.path": Unbuilt("a sampler of your own", (None,)),
}
UNBUILT_SFT: Mapping[str, Unbuilt] = {
    **{f"model.{key}": entry for key, entry in _MODEL_SECTION.items()},
    "model.tokenizer_path": replace(_MODEL_SECTION["tokenizer_path"], same_as="model.path"),
    **{f"engine.{key}": entry for key, entry in _FSDP_SECTION.items()},
    **{f"optim.{key}": entry for key, entry in _OPTIM_SECTION.items()},
}
