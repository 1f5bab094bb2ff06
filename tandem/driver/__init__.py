# SPDX-License-Identifier: Apache-2.0
"""The driver process of a run: it checks the input, starts the processes, and ends them."""
