# SPDX-License-Identifier: Apache-2.0
"""Prompt sources with a resumable ledger, chat rendering, filtering, packing and balancing."""
