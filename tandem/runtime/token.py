# SPDX-License-Identifier: Apache-2.0
"""The token of the clusters that a process forms: a secret that all their processes know.

Ray asks for it at its doors, and the head and the members of a run prove to each other that they
know it, without sending it. The first node writes it to a file beside the run folder, which all
nodes see and only the user can read. The variables are Ray's; those that a user sets are kept.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import time
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.errors import UserError

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
_FILE_VARIABLE = "RAY_AUTH_TOKEN_PATH"
_MODE_VARIABLE = "RAY_AUTH_MODE"
_NUM_BYTES = 32
FILE_WAIT_S = 10.0
"""The time in which a network file system shows a new file to other nodes."""
_POLL_S = 0.2


def token_file(run_folder: Path) -> Path:
    """Return the file of the token of a run on several nodes, beside its folder."""
    return run_folder.parent / f".{run_folder.name}.token"


def own_token(environment: Mapping[str, str]) -> str:
    """Return the token that the user has set, else a random one, the same one in all calls.

    Raises:
        UserError: RAY_AUTH_TOKEN_PATH names a file that cannot be read.
    """
    return _token_of_user(environment) or _random_token()


def is_of_user(environment: Mapping[str, str]) -> bool:
    """Return whether the user has set a token, so that no file is read."""
    return bool(environment.get(TOKEN_VARIABLE) or environment.get(_FILE_VARIABLE))


def member_token(environment: Mapping[str, str], file: Path) -> str:
    """Return the token of a member: the user's, else the one in the first node's file.

    Raises:
        UserError: the file cannot be read.
    """
    given = _token_of_user(environment)
    if given:
        return given
    deadline = time.monotonic() + FILE_WAIT_S
    while True:
        try:
            return file.read_text()
        except FileNotFoundError as error:
            if time.monotonic() >= deadline:
                raise _unreadable(file, error) from error
        except OSError as error:
            raise _unreadable(file, error) from error
        time.sleep(_POLL_S)


def write_token(file: Path, token: str) -> None:
    """Write the token to a new file that only this user can read.

    Raises:
        UserError: the file cannot be written.
    """
    fresh = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(token)
        fresh.replace(file)
    except OSError as error:
        raise UserError(
            "trainer.default_local_dir",
            str(file.parent),
            rule=f"the token of the cluster cannot be written there ({error.strerror})",
            remedy="Choose a folder that all nodes see and that you can write.",
        ) from error


def remove_token(file: Path, token: str) -> None:
    """Remove the file, unless another run has replaced it."""
    with suppress(OSError):
        if file.read_text() == token:
            file.unlink()


def token_environment(token: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make Ray ask for the token, unless the user has decided that."""
    return {_MODE_VARIABLE: environment.get(_MODE_VARIABLE, "token"), TOKEN_VARIABLE: token}


@contextmanager
def added(
    variables: Mapping[str, str], environment: MutableMapping[str, str]
) -> Generator[None, None, None]:
    """Add variables within the block, so that children that start later do not inherit them."""
    new = {name: value for name, value in variables.items() if name not in environment}
    environment.update(new)
    try:
        yield
    finally:
        for name in new:
            environment.pop(name, None)


def new_nonce() -> str:
    """Return a number that is used once."""
    return secrets.token_hex(_NUM_BYTES)


def prove(token: str, statement: Sequence[object]) -> str:
    """Return the proof that its author knows the token and makes this statement (HMAC-SHA256)."""
    return hmac.digest(token.encode(), repr(tuple(statement)).encode(), "sha256").hex()


def is_proof(proof: object, token: str, *, statement: Sequence[object]) -> bool:
    """Return whether ``proof`` is that of the statement, in a time that does not depend on it."""
    expected = prove(token, statement)
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())


@functools.cache
def _random_token() -> str:
    return secrets.token_hex(_NUM_BYTES)


def _token_of_user(environment: Mapping[str, str]) -> str:
    if environment.get(TOKEN_VARIABLE):
        return environment[TOKEN_VARIABLE]
    path = environment.get(_FILE_VARIABLE)
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise UserError(
            _FILE_VARIABLE,
            path,
            rule=f"cannot be read ({error.strerror})",
            remedy="Correct or unset it.",
        ) from error


def _unreadable(file: Path, error: OSError) -> UserError:
    return UserError(
        "trainer.default_local_dir",
        str(file.parent),
        rule=f"this node cannot read {file.name}, which the first node has written there "
        f"({error.strerror})",
        remedy="Choose a folder that all nodes see, or set the same RAY_AUTH_TOKEN on every node.",
    )
