# SPDX-License-Identifier: Apache-2.0
"""What tandem asks of a platform, as checks that run on any: a device here, or a double of one."""
