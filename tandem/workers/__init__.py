# SPDX-License-Identifier: Apache-2.0
"""The engines of a run, built from a configuration: in one process, or in worker processes."""
