# SPDX-License-Identifier: Apache-2.0
"""The contract of a platform, as checks that run on any of them: on hardware or on a double."""
