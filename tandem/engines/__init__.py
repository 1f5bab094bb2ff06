# SPDX-License-Identifier: Apache-2.0
"""Training engines: a policy or a critic with its optimizer, independent of the algorithm."""
