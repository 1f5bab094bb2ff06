# SPDX-License-Identifier: Apache-2.0
"""The environment variables of processes that run a user's code.

Variables that programs need in order to run pass. All others, keys of services among them, must be
named in the configuration. A child knows the names that were withheld, never their values, so that
an error can say what to name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tandem.errors import UserError

ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "HOSTNAME"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP", "XDG_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "RAYON_*"),
    # Without its visibility variable, a process sees devices that the run was not given.
    "*_VISIBLE_DEVICES",
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
    *("HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
    *("TORCH_HOME", "NLTK_DATA"),
)
"""Patterns of the variables that always pass."""
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "NO_PROXY")
"""These pass, in capitals or not, unless they hold a password (``http://name:password@host``)."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ChildEnvironment:
    """The variables that a child process gets, and the names of those that it does not get.

    Example:
        >>> child_environment({"PATH": "/bin", "API_KEY": "secret"}, key="reward.environment")
        ChildEnvironment(variables={'PATH': '/bin'}, withheld=frozenset({'API_KEY'}))
    """

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    withheld: frozenset[str] = frozenset()


def child_environment(
    environment: Mapping[str, str], named: Sequence[str] = (), *, key: str
) -> ChildEnvironment:
    """Return the variables of ``environment`` that pass always or by name, and the others' names.

    Args:
        named: names, which may hold ``*`` for any characters; the value of ``key``.

    Raises:
        UserError: nothing in ``environment`` has one of the names.
    """
    for pattern in named:
        name, is_assignment, _ = pattern.partition("=")
        if is_assignment:  # the value may be a secret, which no message may show
            raise UserError(
                key,
                f"{name}=...",
                rule="must be names without values",
                remedy=f"Export {name} and name it: {key}=[{name}].",
            )
        if not any(fnmatchcase(name, pattern) for name in environment):
            raise UserError(
                key,
                pattern,
                rule="is not set in the environment of this run",
                remedy="Export the variable, or leave it out.",
            )
    variables = {
        name: value
        for name, value in environment.items()
        if _is_allowed(name, value) or _matches(name, named)
    }
    return ChildEnvironment(variables, frozenset(environment.keys() - variables.keys()))


def hint_at_withheld(error: BaseException, withheld: Collection[str], *, key: str) -> str:
    """Return the advice for an error that names a withheld variable, or an empty text."""
    missing = error.args[0] if isinstance(error, KeyError) and error.args else None
    # A message may say "HOME" or "_" for other reasons; names of keys have two words.
    words = [word for word in _WORD.findall(str(error)) if "_" in word.strip("_")]
    found = next((name for name in (missing, *words) if name in withheld), None)
    if found is None:
        return ""
    return f"the variable {found} of the run is not passed on: add it to {key}=[{found}]"


def _is_allowed(name: str, value: str) -> bool:
    if name.upper() in _PROXIES:
        return "@" not in value
    return _matches(name, ALLOWED)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
