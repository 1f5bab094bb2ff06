# SPDX-License-Identifier: Apache-2.0
"""Rewards: rules, functions of the user, shaping, and the pool of processes that runs them."""
