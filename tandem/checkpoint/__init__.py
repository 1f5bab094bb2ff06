# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, written atomically, and the lock of its folder."""
