# SPDX-License-Identifier: Apache-2.0
"""One pipeline for synchronous and asynchronous training."""
