# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: dense, paged, over transformers' generate, and the table that builds them."""
