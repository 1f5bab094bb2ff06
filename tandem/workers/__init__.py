# SPDX-License-Identifier: Apache-2.0
"""What runs inside a process: engines put together from a config."""
