# SPDX-License-Identifier: Apache-2.0
"""Every rule is shown a made-up file that breaks it and one that comes close but is right."""

from __future__ import annotations

import pytest

from tests.arch.source import parse
from tests.arch.test_rules import RULES

HEAD = '# SPDX-License-Identifier: Apache-2.0\n"""A module."""\n'
ROOM = "tandem/algorithms/made_up.py"


def deep(blocks: int) -> str:
    """A function of so many nested ifs."""
    lines = [f"{'    ' * (k + 1)}if x > {k}:" for k in range(blocks)]
    return "def f(x):\n" + "\n".join([*lines, f"{'    ' * (blocks + 1)}return x"]) + "\n"


def wide(blocks: int) -> str:
    """A function of so many branches one after another."""
    return "def f(x):\n" + "".join(f"    if x > {k}:\n        x = {k}\n" for k in range(blocks))


def long(lines: int) -> str:
    """A function with a docstring and so many lines of body."""
    return 'def f(x):\n    """A sentence."""\n' + "    x += 1\n" * lines


def chain(depth: int) -> str:
    """Classes that inherit one another so deep."""
    return "class C0:\n    x = 1\n" + "".join(
        f"class C{k + 1}(C{k}):\n    x = 1\n" for k in range(depth)
    )


# rule: (path, text that breaks it, text that does not)
CASES: dict[str, tuple[str, str, str]] = {
    "7-file-length": (ROOM, "x = 1\n" * 601, "x = 1\n" * 598),
    "7-definition-length": (ROOM, long(61), long(60)),
    "7-median-body": (ROOM, long(13), long(12)),
    "7-imported-names": (
        ROOM,
        "from tandem.types import A, B, C, D, E, F, G, H\n",
        "from tandem.types import A, B, C, D, E, F, G\nfrom typing import Any, Protocol\n",
    ),
    "7-nesting": (ROOM, deep(4), deep(3)),
    "7-branches": (ROOM, wide(13), wide(12)),
    "8-parameters": (ROOM, "def f(a, b, c): ...\n", "def f(self, a, *, b, c, d, e, f, g): ...\n"),
    "8-open-parameters": (
        ROOM,
        "def f(*args):\n    return len(args)\n",
        "def f(*args, **kwargs):\n    return g(*args, **kwargs)\n",
    ),
    "10-inheritance": (ROOM, chain(2), chain(1)),
    "12-import-table": (
        ROOM,
        "def f():\n    from tandem.models.decoder import D\n",
        "from tandem.errors import UserError\nfrom tandem.types import Prompt\n",
    ),
    "12-outside-imports": (ROOM, "from tests.fakes import x\n", "import testing\n"),
    "13-import-position": (ROOM, "def f():\n    import json\n", "import json\n"),
    "14-package-owners": (ROOM, "if TYPE_CHECKING:\n    import ray\n", "import rayleigh\n"),
    "15-import-effects": (
        ROOM,
        "import os\nos.environ['A'] = '1'\n",
        "import re\nX = re.compile('x')\nif __name__ == '__main__':\n    main()\n",
    ),
    "19-config-defaults": (
        ROOM,
        "x = getattr(self.config, 'n', 1)\n",
        "x = getattr(hf_config, 'head_dim', None)\n",
    ),
    "23-environment": (ROOM, "import os\nx = os.environ.get('A')\n", "x = environ\n"),
    "27-version-names": (ROOM, "class LossV2: ...\n", "class Qwen2: ...\n"),
    "39-vendor-names": (
        ROOM,
        "if device == 'cuda': ...\n",
        "def f():\n    '''Not on cuda.'''\n    return F('barracuda', description='cuda')\n",
    ),
    "41-silent-asserts": (ROOM, "assert x\n", "assert x, 'x is set by f'\n"),
    "42-broad-except": (
        ROOM,
        "try:\n    f()\nexcept Exception:\n    pass\n",
        "try:\n    f()\nexcept Exception as e:\n    raise ValueError('f') from e\n",
    ),
    "43-console-output": (ROOM, "logger.info(f'{x}')\n", "logger.info('%s', x)\n"),
    "43b-plain-docstrings": (
        "tandem/finished/made_up.py",
        'def f():\n    """What it returns."""\n',
        'def f():\n    """Return it."""\n\n\nclass C:\n    """A thing."""\n',
    ),
    "43b-plain-words": (
        "tandem/finished/made_up.py",
        "# This cannot be mended.\n",
        "# This cannot be amended, as we recommended.\n",
    ),
    "44-ascii": (ROOM, "x = '\u00e9'\n", "x = 'e'\n"),
    "2-empty-packages": ("tandem/data/__init__.py", "from tandem.data.files import read\n", ""),
    "47-test-classes": ("tests/unit/data/test_files.py", "class TestFiles: ...\n", ""),
    "47-mocks": ("tests/unit/data/test_files.py", "from unittest import mock\n", "import data\n"),
    "47-asserting-tests": (
        "tests/unit/data/test_files.py",
        "def test_it():\n    run()\n",
        "def test_it():\n    assert run()\n",
    ),
}
# Rules about the path or the first lines: what breaks them, and what does not.
WHOLE_FILES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "11-empty-names": (("tandem/data/utils.py", HEAD), ("tandem/data/useful.py", HEAD)),
    "46-spdx": ((ROOM, '"""A module."""\n'), (ROOM, "#!/usr/bin/env python3\n" + HEAD)),
    "2-module-docstring": ((ROOM, "x = 1\n"), (ROOM, HEAD)),
    "47-test-packages": (("tests/unit/__init__.py", HEAD), ("tests/unit/test_x.py", HEAD)),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_bites(rule: str) -> None:
    if rule in WHOLE_FILES:
        bad, good = ([parse(*file)] for file in WHOLE_FILES[rule])
    elif rule == "13-one-adapter":
        lazy = "def f():\n    import wandb\n"
        good = [parse("tandem/metrics/sinks.py", lazy)]
        bad = [*good, parse("tandem/metrics/other.py", lazy)]
    else:
        path, bad_text, good_text = CASES[rule]
        bad, good = [parse(path, HEAD + bad_text)], [parse(path, HEAD + good_text)]
    assert list(RULES[rule](bad)), "the broken file passes"
    assert not list(RULES[rule](good)), "the correct file fails"


@pytest.mark.parametrize(
    "statement",
    [
        "torch.set_num_threads(1)",
        "X = open('f').read()",
        "os.environ['A'] = '1'",
        "logging.basicConfig()",
        "torch.nn.Linear.forward = f",
        "class C:\n    x = subprocess.run(['ls'])",
        "try:\n    signal.signal(2, f)\nexcept ValueError:\n    X = 1",
        "for x in y:\n    z = x",
    ],
)
def test_import_effects_are_seen(statement: str) -> None:
    assert list(RULES["15-import-effects"]([parse(ROOM, HEAD + statement + "\n")]))


@pytest.mark.parametrize(
    "text",
    [
        "import tandem.engines.train\n",
        "from tandem import engines\n",
        "if TYPE_CHECKING:\n    from tandem.rollout.native import Engine\n",
        "def f():\n    import tandem.cli.main as m\n",
    ],
)
def test_every_form_of_import_is_seen(text: str) -> None:
    assert list(RULES["12-import-table"]([parse(ROOM, HEAD + text)]))
