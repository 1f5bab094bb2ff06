# SPDX-License-Identifier: Apache-2.0
"""The training pipeline, synchronous and asynchronous."""
