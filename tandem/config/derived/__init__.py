# SPDX-License-Identifier: Apache-2.0
"""Values that follow from a configuration: its pools, its schedule, and the sizes of its model."""
