# SPDX-License-Identifier: Apache-2.0
"""Accelerator families as frozen records of facts, and how one is selected."""
