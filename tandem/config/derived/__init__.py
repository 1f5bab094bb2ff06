# SPDX-License-Identifier: Apache-2.0
"""Values derived from a configuration: pools, micro-batches, schedule, and sizes of the model."""
