# SPDX-License-Identifier: Apache-2.0
"""The planner: it predicts the time of a step and searches for a better split of the devices."""
