# SPDX-License-Identifier: Apache-2.0
"""Rewards: rules, custom functions, shaping, and the pool of limited processes that runs them."""
