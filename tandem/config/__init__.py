# SPDX-License-Identifier: Apache-2.0
"""The typed configuration: schema, overrides, cross-field rules, schedule, plan. No torch."""
