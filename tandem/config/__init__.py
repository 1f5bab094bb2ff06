# SPDX-License-Identifier: Apache-2.0
"""The configuration: schema, parsing, derived values, checks and the plan. No torch."""
