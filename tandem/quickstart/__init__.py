# SPDX-License-Identifier: Apache-2.0
"""The built-in demonstration: a small word-problem task, a small model, and their training."""
