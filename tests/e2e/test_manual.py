# SPDX-License-Identifier: Apache-2.0
"""Every command in README and the manual runs in a tiny form, in the order of its page.

The files that a page shows are written where its commands run. Its keys stay, but for models, data,
sizes and devices. The tiny form of the quickstart is its run of GRPO on a model that is not tuned.
A command for several accelerators is planned, and a command of an unknown kind fails.
``docs/extend``, ``docs/python.md``, ``docs/engines.md`` and ``docs/servers.md`` have tests of their
own, and ``docs/performance.md`` measures.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tandem.quickstart.tokenizer import TOOL_TEMPLATE
from tandem.quickstart.word_problems import WORD_PROBLEMS, correct
from tests.fakes.commands import Conditions, run_command
from tests.fakes.tiny_experts import write_tiny_qwen3_moe
from tests.fakes.tiny_reward_model import write_random_judge
from tests.fakes.tiny_run import Material

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OTHERS = {DOCS / "engines.md", DOCS / "servers.md", DOCS / "performance.md"}
PAGES = [
    ROOT / "README.md",
    *sorted({*DOCS.glob("*.md"), *(DOCS / "concepts").glob("*.md")} - OTHERS),
]
BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"(?:\$ )?(?:python3? -m )?(?P<words>(?:tandem|torchrun)\b.*)")
INDENTED = re.compile(r"^ {4,}(?:tandem|torchrun|python -m tandem) ", re.MULTILINE)
SHOWN = {"yaml": r"`(\w+\.yaml)`", "json": r"`(\w+\.json)`", "python": r"`(\w+\.py)`"}
"""How the text before a block names the file that it shows, by the kind of the block."""
FIRST_LINE = re.compile(r"# (\w+\.py)\b")
KEYS = re.compile(r"\w+(\.\w+)+=")
QUICKSTART = "tandem/quickstart/grpo.yaml"
HOST = ("trainer.device=cpu", "trainer.nnodes=1")
SIZES = (
    "data.train_batch_size=4",
    "data.max_prompt_length=256",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)


def commands_of(page: Path) -> list[list[str]]:
    """Return the commands of a page's blocks, in words."""
    text = page.read_text("utf-8")
    assert not INDENTED.search(BLOCK.sub("", text)), f"{page}: a command outside of a fenced block"
    blocks = (match["text"] for match in BLOCK.finditer(text) if match["kind"] not in SHOWN)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    found = filter(None, map(PROGRAM.match, lines))
    return [shlex.split(match["words"], comments=True) for match in found]


def files_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file that a page shows."""
    text = page.read_text("utf-8")
    for match in BLOCK.finditer(text):
        before = re.findall(SHOWN.get(match["kind"], "$^"), text[: match.start()][-300:])
        names = FIRST_LINE.findall(match["text"].partition("\n")[0]) or before
        if names:
            yield names[-1], match["text"]


def exports_of(page: Path) -> dict[str, str]:
    """Return the variables that a page exports."""
    return dict(re.findall(r"^export (\w+)=(.*)$", page.read_text("utf-8"), re.MULTILINE))


def keys_of(page: Path) -> list[str]:
    """Return the words of the first block of a page that consists of keys."""
    texts = (match["text"] for match in BLOCK.finditer(page.read_text("utf-8")))
    text = next(filter(KEYS.match, texts), "")
    return shlex.split(text.replace("\\\n", " "))


@dataclass
class Reader:
    """A reader of one page, who types its commands in a folder of his own."""

    page: Path
    folder: Path
    material: Material
    commands: int = 0

    def type(self, words: list[str]) -> None:
        """Run a command in its tiny form; it must succeed."""
        self.commands += 1
        name, *rest = words
        assert name == "tandem", f"no test knows how to run {shlex.join(words)}"
        command, *arguments = (word.replace("$HOME", str(self.folder)) for word in rest)
        tiny = {
            "train": self.train,
            "plan": self.plan,
            "sweep": self.sweep,
            "sft": self.sft,
            "quickstart": self.quickstart,
            "prepare": self.prepare,
            "certify": self.certify,
            "compare": self.compare,
            "report": self.unchanged,
            "export": self.unchanged,
            "sample": self.sample,
            "keys": self.unchanged,
        }.get(command)
        assert tiny is not None, f"no test knows how to run {shlex.join(words)}"
        tiny([command, *arguments])

    def unchanged(self, words: list[str], *, codes: tuple[int, ...] = (0,)) -> None:
        home = {"HOME": str(self.folder), "PYTHONPATH": str(self.folder)}
        conditions = Conditions(environment=exports_of(self.page) | home)
        ended = run_command(words, folder=self.folder, conditions=conditions)
        assert ended.code in codes, f"{shlex.join(words)}\n{ended.stdout}\n{ended.stderr}"

    def train(self, words: list[str]) -> None:
        arguments = self.filled_in(words[1:])
        if "trainer.device=cpu" not in arguments and any(map(_is_of_devices, arguments)):
            self.unchanged(["plan", "--elsewhere", *arguments])
        else:
            self.unchanged(["train", *arguments, *self.tiny(arguments)])

    def sweep(self, words: list[str]) -> None:
        arguments = self.filled_in(words[1:])
        self.unchanged(["sweep", *arguments, *self.tiny(arguments)])

    def plan(self, words: list[str]) -> None:
        options = [word for word in words[1:] if word in ("--elsewhere", "--times", "sft")]
        arguments = self.filled_in(words[1:])
        if options or any(map(_is_of_devices, arguments)):
            model = f"actor_rollout_ref.model.path={self.material.policy}"
            filled = [model if word.endswith("=MODEL_FOLDER") else word for word in arguments]
            self.unchanged(["plan", *([] if options else ["--elsewhere"]), *filled])
        else:
            self.unchanged(["plan", *arguments, *self.tiny(arguments)])

    def sft(self, words: list[str]) -> None:
        self.unchanged(
            [
                *(word for word in words if word != "..." and not word.startswith("model.path=")),
                f"model.partial_pretrain={self.material.policy}",
                f"data.train_files={self.material.demonstrations}",
                f"data.val_files={self.material.demonstrations}",
                "data.train_batch_size=8",
                "trainer.total_training_steps=1",
                *HOST,
            ]
        )

    def sample(self, words: list[str]) -> None:
        self.unchanged([*words, "--max-tokens", "2", "--device", "cpu"])

    def quickstart(self, words: list[str]) -> None:
        folder = words[words.index("--folder") + 1] if "--folder" in words else "outputs/quickstart"
        keys = [word for word in words if KEYS.match(word)]
        run = f"trainer.default_local_dir={folder}/grpo"
        self.unchanged(["train", str(ROOT / QUICKSTART), *keys, run, *self.tiny(keys)])

    def prepare(self, words: list[str]) -> None:
        for split in ("train", "test"):
            rows = [
                json.dumps({"question": problem.question, "answer": correct(problem)})
                for problem in WORD_PROBLEMS.draw(8, seed=3)
            ]
            (self.folder / f"{split}.jsonl").write_text("\n".join(rows), "utf-8")
        self.unchanged([*words, "--source", str(self.folder)])

    def certify(self, words: list[str]) -> None:
        self.unchanged([*words, "--platform", "cpu", "--ranks", "1"])

    def compare(self, words: list[str]) -> None:
        """Compare runs of the page; a run that the page takes for granted has 120 steps."""
        names = [word for word in words[1:] if "/" in word or word.endswith(".log")]
        for name in names:
            path = self.folder / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                is_folder = not path.suffix
                path.mkdir() if is_folder else None
                target = path / "metrics.jsonl" if is_folder else path
                target.write_text("".join(_record(step, is_folder) for step in range(1, 121)))
        self.unchanged(words, codes=(0, 1, 2))  # 2: it cannot tell from so few steps

    def filled_in(self, words: list[str]) -> list[str]:
        """Put the reader's own keys in the place of placeholders, and find the recipes."""
        own = [
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={self.material.policy}",
            f"data.train_files={self.material.train}",
            f"data.val_files={self.material.test}",
            "data.train_batch_size=32",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            f"trainer.default_local_dir=runs/{self.commands}",
        ]
        judge = self.folder / "judge"
        placed: list[str] = []
        for word in words:
            if word in ("...", "recipe.yaml"):
                placed += own
            elif word == "KEYS":
                placed += [key.replace("$HOME", str(self.folder)) for key in keys_of(self.page)]
            elif word == "reward_model.model.path=FOLDER":
                placed.append(f"reward_model.model.path={_judge(self.material, judge)}")
            elif "/global_step_" in word:  # of a longer run than the tiny one
                placed.append(re.sub(r"global_step_\d+", "global_step_1", word))
            else:
                key, equals, path = word.rpartition("=")
                is_recipe = path.endswith(".yaml") and not (self.folder / path).exists()
                placed.append(f"{key}{equals}{ROOT / path}" if is_recipe else word)
        return placed

    def tiny(self, arguments: list[str]) -> list[str]:
        """Return the keys that make a run small."""
        data = (f"data.train_files={self.material.train}", f"data.val_files={self.material.test}")
        is_prepared = (self.folder / "data/gsm8k/train.parquet").exists()
        devices = 2 if any(map(_is_of_devices, arguments)) else 1
        # The tiny model's own template has no calls.
        with_calls = ("/examples/agent/", "multi_turn.enable=True")
        calls = any(part in word for word in arguments for part in with_calls)
        (self.folder / "calls.jinja").write_text(TOOL_TEMPLATE, "utf-8")
        template = f"actor_rollout_ref.model.custom_chat_template={self.folder / 'calls.jinja'}"
        return [
            *([template] if calls else []),
            f"actor_rollout_ref.model.path={self.material.policy}",
            *(() if is_prepared else data),
            *SIZES,
            *HOST,
            f"trainer.n_gpus_per_node={devices}",
            f"trainer.total_training_steps={self.commands}",
        ]


def _is_of_devices(word: str) -> bool:
    keys = ("trainer.n_gpus_per_node=", "trainer.nnodes=")
    several = word.startswith(keys) and int(word.partition("=")[2]) > 1
    return several or "examples/devices/" in word


def _judge(material: Material, folder: Path) -> Path:
    return folder if folder.exists() else write_random_judge(material.policy, folder)


def _record(step: int, is_json: bool) -> str:
    values = {"critic/rewards/mean": 0.5 + step / 1000, "perf/throughput": 100.0}
    if is_json:
        return json.dumps({"step": step} | values) + "\n"
    fields = " - ".join(f"{name}:{value}" for name, value in values.items())
    return f"step:{step} - {fields}\n"


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if commands_of(p)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, material: Material, tmp_path: Path) -> None:
    if page.stem == "experts":
        material = replace(material, policy=write_tiny_qwen3_moe(tmp_path / "model"))
    reader = Reader(page, tmp_path, material)
    for name, text in files_of(page):
        (tmp_path / name).write_text(text, "utf-8")
    for words in commands_of(page):
        reader.type(words)


def test_a_command_of_an_unknown_kind_fails(material: Material, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\ntorchrun -m tandem.trainer.sft_trainer\ntandem serve\n```\n")
    for words in commands_of(page):
        with pytest.raises(AssertionError, match="no test knows"):
            Reader(page, tmp_path, material).type(words)
