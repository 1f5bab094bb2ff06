# SPDX-License-Identifier: Apache-2.0
"""The prediction of the time of a step, and the search for a better split of the devices."""
