# SPDX-License-Identifier: Apache-2.0
"""The native rollout engine: continuous batching over the trainer's own decoder."""
