# SPDX-License-Identifier: Apache-2.0
"""Environments of episodes with several turns: tools and simulated users, in child processes."""
