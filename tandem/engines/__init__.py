# SPDX-License-Identifier: Apache-2.0
"""Training engines. They hold a policy or a critic and its optimizer, and know no algorithm."""
