# SPDX-License-Identifier: Apache-2.0
"""The HTML report of a run, and the comparison of runs."""
