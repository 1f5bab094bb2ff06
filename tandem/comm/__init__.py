# SPDX-License-Identifier: Apache-2.0
"""Stores, the default world of a pool, and process groups across pools."""
