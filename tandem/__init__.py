# SPDX-License-Identifier: Apache-2.0
"""tandem: reinforcement-learning post-training of language models, generation and training in
tandem.
"""

__version__ = "0.1.0"
