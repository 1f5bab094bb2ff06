# SPDX-License-Identifier: Apache-2.0
"""For tests of tandem and of what plugs into it: devices of vendors who are not here."""
