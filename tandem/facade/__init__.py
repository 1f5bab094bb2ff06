# SPDX-License-Identifier: Apache-2.0
"""The Python API: ``tandem.train`` and ``tandem.sft``, which run what the command line runs."""
