# SPDX-License-Identifier: Apache-2.0
"""Operators of the decoder fused with Triton, forward and backward. Importing it needs triton."""
