# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine, in child processes of the worker and an interpreter of its own."""
