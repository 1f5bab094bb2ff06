# SPDX-License-Identifier: Apache-2.0
"""``tandem sample --image``: a model that sees answers about pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tandem.cli.sample import parse
from tandem.cli.sample_here import run
from tandem.errors import UserError
from tandem.models.weights import WEIGHTS_FILE
from tests.fakes.seeing_files import png, write_policy
from tests.fakes.tiny_policy import write_tiny_policy


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers depend on pictures, a model of text, pictures, and no picture."""
    root = tmp_path_factory.mktemp("sample")
    tensors = load_file(write_policy(root / "model") / WEIGHTS_FILE)
    larger = {name: x * 6 if "embed_tokens" not in name else x for name, x in tensors.items()}
    save_file(larger, root / "model" / WEIGHTS_FILE, metadata={"format": "pt"})
    write_tiny_policy(root / "text")
    for seed in (1, 2):
        (root / f"{seed}.png").write_bytes(png(seed=seed))
    (root / "none.png").write_text("no picture")
    return root


def words_of(root: Path, *words: str) -> list[str]:
    return [word.replace("ROOT", str(root)) for word in words]


def test_the_answer_is_about_the_pictures(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = (
        ("how many?", "--image", "ROOT/1.png"),
        ("<image>how many?", "--image", "ROOT/1.png"),
        ("how many?", "--image", "ROOT/2.png"),
        ("<image>how <image>many?", "--image", "ROOT/1.png", "--image", "ROOT/2.png"),
    )
    answers: list[str] = []
    for way in ways:
        words = words_of(root, "ROOT/model", *way, "--greedy", "--max-tokens", "12")
        assert run(parse([*words, "--device", "cpu"])) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3


REFUSED = {
    ("ROOT/text", "hi", "--image", "ROOT/1.png"): "--image='.*': the model reads text only",
    ("ROOT/model", "hi", "--image", "ROOT/x.png"): "names a picture that is missing",
    ("ROOT/model", "hi", "--image", "ROOT/none.png"): "that is no picture file. Name files of",
    ("ROOT/model", "hi", "--image", "ROOT/1.png", "--raw"): "does not go with --raw",
    (
        *("ROOT/model", "<image>hi", "--image", "ROOT/1.png", "--image", "ROOT/2.png"),
    ): "has 1 mark <image> and 2 pictures",
}


@pytest.mark.parametrize("words", REFUSED)
def test_pictures_that_cannot_be_asked_about_are_refused_in_one_line(
    words: tuple[str, ...], root: Path
) -> None:
    with pytest.raises(UserError, match=REFUSED[words]) as caught:
        run(parse([*words_of(root, *words), "--device", "cpu"]))
    assert "\n" not in str(caught.value)
