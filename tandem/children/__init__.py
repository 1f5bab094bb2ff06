# SPDX-License-Identifier: Apache-2.0
"""Child processes with limits: their life, their channel, and their end with the parent."""
