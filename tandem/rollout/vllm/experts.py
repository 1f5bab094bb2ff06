# SPDX-License-Identifier: Apache-2.0
"""Divided experts in vLLM's build for CPUs.

With expert parallelism vLLM gives its kernels the numbers of a token's experts in the whole layer,
and a map from them to the experts that this process has. The kernel for CPUs does not read the map,
and would read memory behind its weights.
"""

from __future__ import annotations

from typing import Any

from tandem.rollout.vllm.library import of_vllm

_KERNELS = "model_executor.layers.fused_moe.experts.cpu_moe"
_changed: set[type] = set()


def compute_own_experts_on_cpus() -> None:
    """Make the kernel for CPUs compute the experts of this process alone; idempotent.

    Shapes: T tokens, K experts of a token.

    The experts of other processes get the weight 0. vLLM adds up the results of all processes.
    """
    kernel: Any = of_vllm(_KERNELS, "CPUUnquantizedExperts")
    if kernel in _changed:
        return
    _changed.add(kernel)
    compute_given = kernel.apply

    def apply_own(experts: Any, **given: Any) -> Any:
        places = given["expert_map"]
        if places is not None:
            local_TK = places[given["topk_ids"].long()]
            weight_TK = given["topk_weights"].masked_fill(local_TK < 0, 0.0)
            given |= {"topk_weights": weight_TK, "topk_ids": local_TK.clamp_min(0)}
        return compute_given(experts, **given)

    kernel.apply = apply_own
