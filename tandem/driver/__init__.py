# SPDX-License-Identifier: Apache-2.0
"""The driver process of a run: it prepares a run, starts its processes and ends it."""
