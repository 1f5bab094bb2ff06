# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the paged engine. Imported only where triton is installed."""
