# SPDX-License-Identifier: Apache-2.0
"""The contracts of platforms and rollout engines, as checks that run on any of them."""
