# SPDX-License-Identifier: Apache-2.0
"""Test support for tandem and its plug-ins: doubles of vendors' devices, and the contract suite."""
