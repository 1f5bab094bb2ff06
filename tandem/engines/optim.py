# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a policy and its learning-rate schedule.

The optimizer is AdamW or Adam, or Muon for the matrices of the layers and AdamW for all other
parameters. As in verl, AdamW decays every parameter, including one-dimensional ones. Muon
orthogonalises query, key, value, gate and up separately, not the decoder's fused matrices, which
would couple them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tandem.config.schema.optim import OptimConfig
from tandem.engines.adamw import AdamW, Moments
from tandem.engines.muon import Matrix, Muon
from tandem.engines.shards import ShardMap
from tandem.errors import UserError
from tandem.models.adapted import trained_parameters
from tandem.models.decoder import parameter_shapes
from tandem.models.file_tensors import file_tensors
from tandem.models.language_model import LanguageModel
from tandem.models.parallel import whole_config


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """A linear warm-up over ``warmup_steps``, then a constant or a cosine.

    The formulas are those of verl and transformers: the first training step is step 0, which has
    learning rate 0 with a warm-up.

    Attributes:
        min_ratio: the lower bound of the cosine's factor.
        num_cycles: the number of cosine waves; 0.5 falls once.
    """

    kind: Literal["constant", "cosine"]
    warmup_steps: int
    total_steps: int
    min_ratio: float
    num_cycles: float

    def factor(self, step: int) -> float:
        """Return the factor of the configured rate at a training step, counted from 0."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        wave = math.cos(math.pi * self.num_cycles * 2.0 * progress)
        cosine = 0.5 * (1 - self.min_ratio) * wave + 0.5 * (1 + self.min_ratio)
        return max(self.min_ratio, cosine)


def make_schedule(config: OptimConfig, total_training_steps: int) -> LearningRateSchedule:
    """Return the configured schedule; ``config.total_training_steps`` takes precedence if set."""
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
        min_ratio=config.final_ratio,
        num_cycles=config.num_cycles,
    )


def warmup_steps(steps: int, ratio: float, *, total_steps: int) -> int:
    """Return ``steps`` if positive, else ``ratio`` of all steps, rounded down, as in verl."""
    return steps if steps > 0 else int(ratio * total_steps)


def choose_changed(model: LanguageModel) -> Callable[[str], bool]:
    """Return the function that tells whether an optimizer changes a parameter of ``model``."""
    return (lambda _: True) if model.decoder is None else model.decoder.config.is_changed


class PolicyOptimizer:
    """A pair of optimizers, or one, that step together, each at its own learning rate.

    Weights, gradients and moments are this process's parts.

    Attributes:
        members: the parameters of each optimizer, in the order of its moments.
        every_member: the same with the parameters of all stages.
    """

    def __init__(self, model: LanguageModel, config: OptimConfig, *, shard_map: ShardMap) -> None:
        is_changed = choose_changed(model)
        matrices = _matrices(model) if config.optimizer == "Muon" else []
        matrices = [matrix for matrix in matrices if is_changed(matrix.owner)]
        owners = {matrix.owner for matrix in matrices}
        held = shard_map.regions
        decay = config.weight_decay
        self._name = config.optimizer
        first = "Adam" if config.optimizer == "Adam" else "AdamW"
        changed = [name for name in shard_map.names if is_changed(name)]
        self.every_member = {first: [name for name in changed if name not in owners]}
        self._peak_rates = {first: config.lr}
        self._optimizers: dict[str, AdamW | Muon] = {
            first: AdamW(
                betas=config.betas,
                weight_decay=decay,
                stored=next(iter(trained_parameters(model.module).values())).dtype,
                half_moments=config.moments_dtype == "bfloat16",
                is_coupled=first == "Adam",
            )
        }
        if matrices:
            self.every_member["Muon"] = [name for name in changed if name in owners]
            self._peak_rates["Muon"] = config.muon_lr
            own = [matrix for matrix in matrices if matrix.owner in held]
            self._optimizers["Muon"] = Muon(own, weight_decay=decay, shard_map=shard_map)
        self.members = {
            kind: [name for name in names if name in held]
            for kind, names in self.every_member.items()
        }

    def step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, rate_factor: float
    ) -> None:
        """Take one step at ``rate_factor`` times the configured rates.

        Offloaded moments move to the weights' device.
        """
        for name, optimizer in self._optimizers.items():
            own = {member: weights[member] for member in self.members[name]}
            optimizer.moments = _moved(optimizer.moments, next(iter(own.values())).device)
            optimizer.step(own, gradients, rate=self._peak_rates[name] * rate_factor)

    @property
    def alone(self) -> AdamW | None:
        """The optimizer of all weights, whose steps treat each number alone; None with Muon."""
        (first, *others) = self._optimizers.values()
        return first if isinstance(first, AdamW) and not others else None

    def rate_of(self, optimizer: AdamW, *, rate_factor: float) -> float:
        """Return the learning rate of one of the optimizers."""
        (name,) = (name for name, own in self._optimizers.items() if own is optimizer)
        return self._peak_rates[name] * rate_factor

    def offload(self) -> None:
        """Move the moments to the host's memory until the next step."""
        for optimizer in self._optimizers.values():
            optimizer.moments = _moved(optimizer.moments, torch.device("cpu"))

    def allocate(self, weights: Mapping[str, Tensor]) -> None:
        """Allocate all moments, set to zero."""
        for name, optimizer in self._optimizers.items():
            own = {x: weights[x] for x in self.members[name]}
            is_adam = isinstance(optimizer, AdamW)
            optimizer.moments = (
                optimizer.new_moments(own) if is_adam else optimizer.zero_moments(own)
            )

    def state_dict(self) -> dict[str, Moments]:
        """Return the moments of each optimizer by its name."""
        return {name: optimizer.moments for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Moments]) -> None:
        """Restore the moments that ``state_dict`` returned for the same parameters."""
        for name, optimizer in self._optimizers.items():
            optimizer.adopt(state[name])

    def spread_scalars(self) -> None:
        """Copy each scalar moment of the first parameter, the only one in checkpoints, to all."""
        for moments in self.state_dict().values():
            for first, *others in moments.values():
                for other in others if not first.dim() else ():
                    other.copy_(first)

    def require_same(self, saved: Collection[str]) -> None:
        """Raise UserError unless ``saved`` names the same optimizers."""
        if set(saved) != self._optimizers.keys():
            raise UserError(
                "actor_rollout_ref.actor.optim.optimizer",
                self._name,
                rule=f"the checkpoint has the state of {', '.join(saved)}",
                remedy="Resume with the optimizer of the checkpoint.",
            )


def _moved(moments: Moments, device: torch.device) -> Moments:
    return {name: [tensor.to(device) for tensor in group] for name, group in moments.items()}


def _matrices(model: LanguageModel) -> list[Matrix]:
    """Return the linear maps of the layers, without embedding and language-model head."""
    if model.decoder is None:
        head = model.lm_head_weight
        linears = [part.weight for part in model.module.modules() if isinstance(part, nn.Linear)]
        owners = {id(weight) for weight in linears if weight is not head}
        return [
            Matrix(name, 0, rows=weight.shape[0], columns=weight.shape[1])
            for name, weight in model.module.named_parameters()
            if id(weight) in owners
        ]
    config = whole_config(model.decoder.config, model.layout.tensor.size)
    shapes = parameter_shapes(config)
    has_tower = config.vision is not None and not config.vision.is_frozen
    layers = ("layers.", "tower.blocks.") if has_tower else ("layers.",)
    return [
        Matrix(
            part.parameter,
            part.start,
            rows=part.rows,
            columns=shapes[part.parameter][-1],
            expert=part.expert,
        )
        for part in file_tensors(config)
        if part.parameter.startswith(layers)
        and (len(shapes[part.parameter]) == 2 or part.expert is not None)
    ]
