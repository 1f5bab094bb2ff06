# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine, in the process of the worker."""
