# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a policy: AdamW, or Muon for the matrices of the layers and AdamW for everything
else.

As in verl, AdamW decays every parameter, one-dimensional ones too. Muon orthogonalises each of the
matrices that Hugging Face names, not the fused ones the decoder computes with: query, key, value,
gate and up are separate maps, which a common orthogonalisation would couple.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from tandem.config.optim import OptimConfig
from tandem.engines.adamw import AdamW, Moments
from tandem.engines.muon import Matrix, Muon
from tandem.engines.schedule import LearningRateSchedule, warmup_steps
from tandem.errors import UserError
from tandem.models.language_model import LanguageModel
from tandem.models.weights import file_tensors


def make_schedule(config: OptimConfig, total_training_steps: int) -> LearningRateSchedule:
    """The schedule of the config, whose own ``total_training_steps`` wins if positive."""
    if config.total_training_steps > 0:
        total_training_steps = config.total_training_steps
    return LearningRateSchedule(
        kind=config.lr_scheduler_type,
        warmup_steps=warmup_steps(
            config.lr_warmup_steps,
            config.lr_warmup_steps_ratio,
            total_steps=total_training_steps,
        ),
        total_steps=total_training_steps,
        min_ratio=config.min_lr_ratio,
        num_cycles=config.num_cycles,
    )


class PolicyOptimizer:
    """One or two optimizers that step together, each at its own rate."""

    def __init__(self, model: LanguageModel, config: OptimConfig, *, offload: bool = False) -> None:
        """``offload``: moments rest in the host's memory between steps."""
        self._device = model.lm_head_weight.device
        self._offload = offload
        matrices = _matrices(model) if config.optimizer == "Muon" else []
        owners = {id(matrix.owner) for matrix in matrices}
        rest = [
            parameter
            for parameter in model.module.parameters()
            if parameter.requires_grad and id(parameter) not in owners
        ]
        decay = config.weight_decay
        self._peak_rates = {"AdamW": config.lr}
        self._optimizers: dict[str, AdamW | Muon] = {
            "AdamW": AdamW(rest, betas=config.betas, weight_decay=decay)
        }
        if matrices:
            self._peak_rates["Muon"] = config.muon_lr
            self._optimizers["Muon"] = Muon(matrices, weight_decay=decay)

    def step(self, rate_factor: float) -> None:
        """One step at ``rate_factor`` times the configured rates."""
        for name, optimizer in self._optimizers.items():
            optimizer.moments = _moved(optimizer.moments, self._device)
            optimizer.step(self._peak_rates[name] * rate_factor)
            if self._offload:
                optimizer.moments = _moved(optimizer.moments, torch.device("cpu"))

    def state_dict(self) -> dict[str, Moments]:
        """The moments of each optimizer by its name."""
        return {name: optimizer.moments for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state: dict[str, Moments]) -> None:
        """Take over moments that ``state_dict`` returned, which belong to the same parameters.

        Raises:
            UserError: they are those of another optimizer.
        """
        if state.keys() != self._optimizers.keys():
            configured = "Muon" if "Muon" in self._optimizers else "AdamW"
            raise UserError(
                f"actor_rollout_ref.actor.optim.optimizer={configured!r}: the checkpoint holds "
                f"the state of {', '.join(state)}. Resume with the optimizer it was saved with."
            )
        for name, optimizer in self._optimizers.items():
            optimizer.moments = state[name]


def _moved(moments: Moments, device: torch.device) -> Moments:
    """The same tensors if they are there already."""
    return {name: [tensor.to(device) for tensor in group] for name, group in moments.items()}


def _matrices(model: LanguageModel) -> list[Matrix]:
    """The linear maps within the layers; not embeddings, not the language-model head."""
    if model.decoder is None:
        head = model.lm_head_weight
        linears = [part for part in model.module.modules() if isinstance(part, nn.Linear)]
        owners = [cast(nn.Parameter, part.weight) for part in linears if part.weight is not head]
        return [Matrix(owner, 0, owner.shape[0]) for owner in owners]
    parameters = dict(model.decoder.named_parameters())
    return [
        Matrix(parameters[part.ours], part.start, part.rows)
        for part in file_tensors(model.decoder.config)
        if part.ours.startswith("layers.") and parameters[part.ours].dim() == 2
    ]
