# SPDX-License-Identifier: Apache-2.0
"""Transfer of weights from the layout that trains to the layout that generates."""
