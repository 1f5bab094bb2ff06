# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``tandem sweep [RECIPE] key=a,b key=value ...``: those of several runs.

A key with several values makes a run of each, and several such keys a run of each combination.
Commas within brackets, braces and quotes belong to a value. The folder of a run is named by its own
values, below ``trainer.default_local_dir``. ``driver.sweep`` runs the command.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

from tandem.config.check.sweep_rules import check_sweep
from tandem.config.parse.overrides import LoadedConfig
from tandem.config.schema.run import RunConfig
from tandem.driver.arguments import load_runnable
from tandem.driver.notices import configure_logging, notices
from tandem.driver.sweep_run import SweptRun
from tandem.errors import UserError

_FOLDER = "trainer.default_local_dir"
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "\"'"


def parse(arguments: Sequence[str]) -> list[SweptRun]:
    """Return the checked runs of a sweep. Raise UserError if an argument is wrong."""
    configure_logging()
    choices = [_choices(word) for word in arguments]
    swept = {place: _key(words[0]) for place, words in enumerate(choices) if len(words) > 1}
    if not swept:
        raise UserError(
            "tandem sweep",
            rule="no key has several values",
            remedy="Write one as key=a,b,c, or use tandem train.",
        )
    for place, key in swept.items():
        _check_key(key, later=[_key(words[0]) for words in choices[place + 1 :]])
    runs = [_run(words, swept=swept) for words in product(*choices)]
    (twice, number), *_ = Counter(name for name, _ in runs).most_common(1)
    if number > 1:
        raise UserError(twice, rule="two runs have this name", remedy="Give each value once.")
    shown: set[str] = set()
    for _, loaded in runs:
        new = [line for line in notices(loaded) if line not in shown]
        shown.update(new)
        sys.stderr.writelines(f"{line}\n" for line in new)
    check_sweep([loaded.config for _, loaded in runs])
    return [SweptRun(name, loaded.config) for name, loaded in runs]


def _check_key(key: str, *, later: Sequence[str]) -> None:
    """Raise UserError if runs cannot differ by a key, behind which the keys ``later`` stand."""
    if key == _FOLDER:
        raise UserError(_FOLDER, rule="is the folder of all runs", remedy="Give it one value.")
    if key in later:
        rule = "has several values, and is given again behind them"
        raise UserError(key, rule=rule, remedy="Give it once.")


def _run(words: Sequence[str], *, swept: Mapping[int, str]) -> tuple[str, LoadedConfig[RunConfig]]:
    """Return the name of a run, and its configuration with a folder and without a console.

    Args:
        swept: the places of the words that have the run's own values, with their keys.
    """
    last = Counter(key.rpartition(".")[2] for key in swept.values())
    parts: list[str] = []
    for place, key in swept.items():
        short = key.rpartition(".")[2]
        value = re.sub(r"[^\w.-]+", "_", words[place].partition("=")[2]).strip("_")
        parts.append(f"{short if last[short] == 1 else key}_{value}")
    name = "+".join(parts)
    trainer = load_runnable(RunConfig, words).config.trainer
    values = {
        _FOLDER: str(trainer.run_folder / name),
        "trainer.logger": [sink for sink in trainer.logger if sink != "console"],
    }
    return name, load_runnable(RunConfig, words, values=values)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _choices(word: str) -> list[str]:
    """Return a word once for each of its values."""
    key, equals, value = word.partition("=")
    if not equals or key.startswith("-"):
        return [word]
    return [f"{key}={part}" for part in _split(value)]


def _split(text: str) -> list[str]:
    """Split a text at the commas that are not in brackets, braces or quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and depth == 0 and not quote:
            parts.append("")
            continue
        parts[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        else:
            depth += (character in _OPENING) - (character in _CLOSING)
    return parts
