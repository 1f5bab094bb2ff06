# SPDX-License-Identifier: Apache-2.0
"""vLLM's servers as a rollout engine: they are started by somebody else and attached by URL."""
