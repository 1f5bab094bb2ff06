# SPDX-License-Identifier: Apache-2.0
"""The rollout engine for accelerators: paged cache, captured decode steps, fused kernels."""
