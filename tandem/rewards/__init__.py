# SPDX-License-Identifier: Apache-2.0
"""Rewards: rules, users' functions, shaping, and the pool of processes that computes them."""
