# SPDX-License-Identifier: Apache-2.0
"""Accelerator families as frozen records of facts, and the selection of one."""
