# SPDX-License-Identifier: Apache-2.0
"""Train state and pipeline state on disk: atomic, with retention."""
