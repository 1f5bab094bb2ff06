# SPDX-License-Identifier: Apache-2.0
"""Parsing of command-line arguments and YAML files into a typed configuration."""
