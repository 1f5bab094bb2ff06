# SPDX-License-Identifier: Apache-2.0
"""The token of a cluster: whose it is, who can read it, and its proofs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.runtime import token as tokens
from tandem.runtime.token import (
    is_proof,
    member_token,
    own_token,
    prove,
    remove_token,
    token_environment,
    token_file,
    write_token,
)


def test_members_read_what_the_first_node_wrote_and_nobody_else_can(tmp_path: Path) -> None:
    file = token_file(tmp_path / "outputs" / "run")
    token = own_token({})
    assert len(token) == 64
    write_token(file, token)
    assert file.stat().st_mode & 0o777 == 0o600
    assert member_token({}, file) == token
    assert list(file.parent.iterdir()) == [file]
    remove_token(file, "that of another run")
    assert file.exists()
    remove_token(file, token)
    remove_token(file, token)
    assert not file.exists()


def test_a_token_of_the_user_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine\n")
    for environment in ({"RAY_AUTH_TOKEN": "mine"}, {"RAY_AUTH_TOKEN_PATH": f"{tmp_path}/mine"}):
        assert own_token(environment) == member_token(environment, tmp_path / "no file") == "mine"
    assert token_environment("t", {}) == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}
    assert token_environment("t", {"RAY_AUTH_MODE": "disabled"})["RAY_AUTH_MODE"] == "disabled"


def test_all_clusters_of_a_process_have_one_token_that_its_other_children_do_not_see() -> None:
    assert own_token({}) == own_token({})
    environment = {"RAY_AUTH_MODE": "disabled"}
    with tokens.added(token_environment("t", environment), environment):
        assert environment == {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t"}
    assert environment == {"RAY_AUTH_MODE": "disabled"}


def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "FILE_WAIT_S", 0.0)
    with pytest.raises(UserError, match=r"RAY_AUTH_TOKEN_PATH='/none': cannot be read"):
        own_token({"RAY_AUTH_TOKEN_PATH": "/none"})
    file = token_file(tmp_path / "run")
    with pytest.raises(UserError, match=r"cannot read \.run\.token.* same RAY_AUTH_TOKEN on every"):
        member_token({}, file)
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"default_local_dir=.*taken.*cannot be written"):
        write_token(token_file(tmp_path / "taken" / "run"), "t")


def test_a_proof_is_of_one_token_and_one_statement() -> None:
    said = ("member", "n", 1)
    proof = prove("token", said)
    assert is_proof(proof, "token", statement=said)
    assert not is_proof(proof, "other", statement=said)
    assert not is_proof(proof, "token", statement=("head", "n", 1))
    assert not is_proof(proof, "token", statement=("member", "n", 2))
    assert not any(is_proof(w, "token", statement=said) for w in ("", None, 3, "\u00e9"))
