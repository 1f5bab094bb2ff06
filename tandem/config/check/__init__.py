# SPDX-License-Identifier: Apache-2.0
"""The rules that a configuration must obey, and the conditions under which a key is read."""
