# SPDX-License-Identifier: Apache-2.0
"""The typed sections of a configuration, one file a section."""
