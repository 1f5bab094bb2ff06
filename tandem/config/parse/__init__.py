# SPDX-License-Identifier: Apache-2.0
"""From command-line arguments and YAML files to a typed configuration."""
