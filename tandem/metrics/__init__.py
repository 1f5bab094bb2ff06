# SPDX-License-Identifier: Apache-2.0
"""Metrics and their names, timers, the trace, recorded rollouts, and sinks."""
