# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, and awaitable calls on the engines in them."""
