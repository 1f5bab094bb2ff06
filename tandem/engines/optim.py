# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a policy: AdamW, or Muon for the matrices of the layers and AdamW for everything
else.

As in verl, AdamW decays every parameter, one-dimensional ones too. Muon orthogonalises each of the
matrices that Hugging Face names, not the fused ones the decoder computes with: query, key, value,
gate and up are separate maps, which a common orthogonalisation would couple.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from tandem.config.schema.optim import OptimConfig
from tandem.engines.adamw import AdamW, Moments
from tandem.engines.muon import Matrix, Muon
from tandem.engines.schedule import LearningRateSchedule, warmup_steps
from tandem.engines.slices import Holding
from tandem.errors import UserError
from tandem.models.decoder import parameter_shapes
from tandem.models.language_model import LanguageModel
from tandem.models.parallel import whole_config
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
    """One or two optimizers that step together, each at its own rate.

    Weights, gradients and moments are the parts of the parameters that this process holds.

    Attributes:
        members: the parameters of each optimizer, in the order of its moments.
    """

    def __init__(self, model: LanguageModel, config: OptimConfig, *, holding: Holding) -> None:
        matrices = _matrices(model) if config.optimizer == "Muon" else []
        owners = {matrix.owner for matrix in matrices}
        decay = config.weight_decay
        self.members = {"AdamW": [name for name in holding.boxes if name not in owners]}
        self._peak_rates = {"AdamW": config.lr}
        self._optimizers: dict[str, AdamW | Muon] = {
            "AdamW": AdamW(
                betas=config.betas,
                weight_decay=decay,
                stored=model.lm_head_weight.dtype,
                half_moments=config.moments_dtype == "bfloat16",
            )
        }
        if matrices:
            self.members["Muon"] = [name for name in holding.boxes if name in owners]
            self._peak_rates["Muon"] = config.muon_lr
            self._optimizers["Muon"] = Muon(matrices, weight_decay=decay, holding=holding)

    def step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, rate_factor: float
    ) -> None:
        """One step at ``rate_factor`` times the configured rates, where the weights are."""
        for name, optimizer in self._optimizers.items():
            own = {member: weights[member] for member in self.members[name]}
            optimizer.moments = _moved(optimizer.moments, next(iter(own.values())).device)
            optimizer.step(own, gradients, rate=self._peak_rates[name] * rate_factor)

    def rest(self) -> None:
        """Move the moments to the host's memory; the next step takes them back."""
        for optimizer in self._optimizers.values():
            optimizer.moments = _moved(optimizer.moments, torch.device("cpu"))

    def allocate(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with moments of zero, which may be written into."""
        for name, optimizer in self._optimizers.items():
            optimizer.moments = optimizer.zero_moments({x: weights[x] for x in self.members[name]})

    def state_dict(self) -> dict[str, Moments]:
        """The moments of each optimizer by its name."""
        return {name: optimizer.moments for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Moments]) -> None:
        """Take over moments that ``state_dict`` returned, which belong to the same parameters."""
        for name, optimizer in self._optimizers.items():
            optimizer.adopt(state[name])

    def spread_scalars(self) -> None:
        """Give to all parameters what is the same for all, and was read for the first alone."""
        for moments in self.state_dict().values():
            for first, *others in moments.values():
                for other in others if not first.dim() else ():
                    other.copy_(first)

    def require_same(self, saved: Collection[str]) -> None:
        """Raise UserError if optimizers of other names were ``saved``."""
        if set(saved) != self._optimizers.keys():
            configured = "Muon" if "Muon" in self._optimizers else "AdamW"
            raise UserError(
                f"actor_rollout_ref.actor.optim.optimizer={configured!r}: the checkpoint holds "
                f"the state of {', '.join(saved)}. Resume with the optimizer it was saved with."
            )


def _moved(moments: Moments, device: torch.device) -> Moments:
    """The same tensors if they are there already."""
    return {name: [tensor.to(device) for tensor in group] for name, group in moments.items()}


def _matrices(model: LanguageModel) -> list[Matrix]:
    """The linear maps within the layers; not embeddings, not the language-model head."""
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
    return [
        Matrix(part.ours, part.start, rows=part.rows, columns=shapes[part.ours][1])
        for part in file_tensors(config)
        if part.ours.startswith("layers.") and len(shapes[part.ours]) == 2
    ]
