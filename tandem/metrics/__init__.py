# SPDX-License-Identifier: Apache-2.0
"""Named metrics, timers, the trace, recorded rollouts, and sinks."""
