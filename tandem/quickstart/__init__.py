# SPDX-License-Identifier: Apache-2.0
"""The embedded demonstration: a small word-problem task, a small model, and the run over them."""
