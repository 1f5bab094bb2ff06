# SPDX-License-Identifier: Apache-2.0
"""Moves named tensors from the layout they are trained in to the layout they generate with."""
