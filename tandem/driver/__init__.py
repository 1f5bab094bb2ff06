# SPDX-License-Identifier: Apache-2.0
"""The driver process of a run, which checks the input, starts the workers and ends them."""
