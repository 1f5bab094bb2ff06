# SPDX-License-Identifier: Apache-2.0
"""Language models: one decoder for trainer and rollout, attention, log-probs, model folders."""
