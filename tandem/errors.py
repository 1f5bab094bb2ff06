# SPDX-License-Identifier: Apache-2.0
"""The one exception for mistakes a user can make and mend.

Every room may raise it; the command line prints it as one line and exits with code 2. Anything else
that escapes is a defect of ours and keeps its traceback.
"""


class UserError(ValueError):
    """A wrong input, said in one line: ``key=value: rule. Remedy.``

    Example:
        >>> raise UserError("data.train_batch_size=0: must be at least 1. Set
        data.train_batch_size=128.")
    """
