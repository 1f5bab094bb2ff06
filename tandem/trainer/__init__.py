# SPDX-License-Identifier: Apache-2.0
"""verl's entry module names, and nothing else."""
