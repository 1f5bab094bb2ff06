# SPDX-License-Identifier: Apache-2.0
"""Starts processes and turns calls on engines into awaitables."""
