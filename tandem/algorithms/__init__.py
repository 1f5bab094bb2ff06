# SPDX-License-Identifier: Apache-2.0
"""Pure functions of tensors: advantages, policy losses, KL, aggregation, filtering."""
