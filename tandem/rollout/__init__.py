# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: the native one, and the one over transformers' generate."""
