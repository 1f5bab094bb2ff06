# SPDX-License-Identifier: Apache-2.0
"""Training engines: they hold a policy and its optimizer and know no algorithm."""
