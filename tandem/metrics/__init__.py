# SPDX-License-Identifier: Apache-2.0
"""Named metrics, timers, sinks, recorded rollouts and the report of a run."""
