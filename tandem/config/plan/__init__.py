# SPDX-License-Identifier: Apache-2.0
"""The plan of a run, as ``tandem plan`` prints it, and the estimate of its memory."""
