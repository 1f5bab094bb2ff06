# SPDX-License-Identifier: Apache-2.0
"""The training scripts of verl that ``tandem plan`` accepts with the name of the module changed.

    python benchmarks/verl_scripts.py CHECKOUT... [--output FILE]

Each CHECKOUT is a folder of verl or of its recipes. Every shell script in it runs without network,
in a scratch home, with programs that only note their arguments in place of Python, torchrun, ray
and others. What it would have started is planned (``--elsewhere``: models and data are not here).
The scripts run as they are, so use a machine that has nothing to lose.

Prints one JSON object: for each subject, the scripts and those accepted; of the subject "in scope"
(text, FSDP, main_ppo, main_dapo and SFT), each refused script with its message. Scripts that lack a
variable that the user has to set are counted apart.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from measure import tell

from tandem.cli.entries import OTHER_MODULES, spelled_out
from tandem.cli.plan import parse
from tandem.errors import UserError

PROGRAMS = (
    *("python", "python3", "torchrun", "ray", "pip", "pip3", "uv", "hf", "huggingface-cli"),
    *("nvidia-smi", "npu-smi", "curl", "wget", "git", "sleep", "docker", "srun", "sbatch", "sudo"),
    *("apt", "apt-get", "conda", "ssh", "scp", "pkill", "killall", "modelscope", "numactl", "nsys"),
    *("accelerate", "deepspeed", "hdfs", "vllm", "msprof", "mpirun", "wandb", "tensorboard"),
)
STUB = """#!/bin/bash
{ printf '%s\\0' "$(basename "$0")" "$@"; printf '\\1\\0'; } >> "$CALLS"
"""
LAUNCH_OPTION = re.compile(r"--?([\w-]+)=(.*)")
LIMIT_S = 8
IN_SCOPE = "in scope"
APART = "fully asynchronous, one step off"
TRAINER = re.compile(r"(main(?!_generation|_eval)_\w+|_main|trainer)$")
PPO = re.compile(r"(verl\.trainer\.main_ppo|(recipe\.)?dapo\.(src\.)?main_dapo)")
SUBJECTS = {
    "Megatron, MindSpeed": r"megatron_trainer|(strategy|engine|optim)=megatron|mindspeed|mcore",
    "VeOmni, Torchtitan, Turbo": r"(engine|strategy)=(veomni|torchtitan|automodel|turbo)",
    "distillation": r"distillation\.enabled=true",
    "LoRA": r"lora_rank=[1-9]|lora\.rank=[1-9]|lora_adapter_path=",
    "vision": r"image_key=|video_key=|geo3k|-vl-|_vl_|vl-\d|vision|omni",
    "multi-turn, agents": r"multi_turn.enable=true|multiturn|agent_loop_[cm]|tool_(agent|config)",
    "reward model": r"reward_model\.(enable|enable_resource_pool)=true|reward\.reward_model\.",
}
"""Subject -> what its commands say, in lower case; the first that fits counts."""


@dataclass(frozen=True)
class Command:
    """A call of a trainer: its module, its arguments, and the options of its launcher."""

    module: str
    arguments: list[str]
    launcher: dict[str, str]

    @property
    def is_supervised(self) -> bool:
        """Whether it fine-tunes on demonstrations."""
        return "sft_trainer" in self.module

    @property
    def subject(self) -> str:
        """The subject: in scope, or the first capability that it asks for."""
        if self.module in OTHER_MODULES:
            return APART
        if not self.is_supervised and not PPO.fullmatch(self.module):
            return "other trainer"
        text = " ".join(self.arguments).lower()
        found = (name for name, pattern in SUBJECTS.items() if re.search(pattern, text))
        return next(found, IN_SCOPE)

    @property
    def planned(self) -> list[str]:
        """The arguments of ``tandem plan``."""
        name = self.module.rpartition(".")[2] if self.is_supervised else "main_ppo"
        entry = OTHER_MODULES.get(self.module, name)
        words = [*self.arguments]
        if self.is_supervised and not any("n_gpus_per_node" in word for word in words):
            devices = self.launcher.get("nproc_per_node", "8")
            words.append(f"trainer.n_gpus_per_node={devices if devices.isdecimal() else 8}")
        return spelled_out(["plan", entry, *words])[1:]


def calls_of(script: Path, *, checkout: Path, programs: Path) -> list[list[str]]:
    """Run a script with stubbed programs; return the calls of these."""
    with tempfile.TemporaryDirectory() as home:
        calls = Path(home) / "calls"
        calls.touch()
        process = subprocess.Popen(
            ["unshare", "--map-root-user", "--net", "bash", str(script)],
            cwd=checkout,
            env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": home, "CALLS": str(calls)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        noted = calls.read_text(errors="replace").split("\1\0")
    return [call.split("\0")[:-1] for call in noted if call]


def command_of(calls: Sequence[Sequence[str]]) -> Command | None:
    """Return the first call of a trainer; None if there is none."""
    found = (
        Command(call[position + 1], list(call[position + 2 :]), options(call[1:position]))
        for call in calls
        for position, word in enumerate(call[:-1])
        if word == "-m" and TRAINER.search(call[position + 1])
    )
    return next(found, None)


def options(words: Sequence[str]) -> dict[str, str]:
    """Return a launcher's options: ``--name=value``, or a name and the word behind it."""
    pairs = [(word.lstrip("-"), value) for word, value in zip(words, words[1:], strict=False)]
    pairs += [match.groups() for word in words if (match := LAUNCH_OPTION.fullmatch(word))]
    return {name.replace("-", "_"): value for name, value in pairs}


def refusal_of(command: Command, checkout: Path) -> str:
    """Return the message with which the plan refuses a command; "" if it accepts it."""
    try:
        with chdir(checkout):
            refusals = parse(["--elsewhere", *command.planned]).plan.refusals
    except UserError as error:
        return str(error)
    return str(refusals[0]) if refusals else ""


def commands_in(checkout: Path, *, programs: Path) -> Iterator[tuple[str, Command]]:
    """Yield the scripts of a checkout that call a trainer."""
    scripts = sorted(checkout.rglob("*.sh"))
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(partial(calls_of, checkout=checkout, programs=programs), scripts)
    for script, calls in zip(scripts, found, strict=True):
        if command := command_of(calls):
            yield str(script.relative_to(checkout)), command


def write_stubs(folder: Path) -> None:
    """Write the programs that only note their arguments."""
    for name in PROGRAMS:
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)


def main() -> int:
    """Run all scripts and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as programs:
        write_stubs(Path(programs))
        for checkout in [path.resolve() for path in given.checkouts]:
            for script, command in commands_in(checkout, programs=Path(programs)):
                outcome = command.subject, refusal_of(command, checkout)
                found[f"{checkout.name}/{script}"] = outcome
    tell(report_of(found), given.output)
    return 0


def report_of(found: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Return the counts; ``found`` has the subject and the refusal of each script."""
    scripts = Counter(subject for subject, _ in found.values())
    accepted = Counter(subject for subject, refusal in found.values() if not refusal)
    unset = Counter(subject for subject, refusal in found.values() if "value is empty" in refusal)
    inside = {name: refusal for name, (subject, refusal) in found.items() if subject == IN_SCOPE}
    checkouts = list(dict.fromkeys(name.partition("/")[0] for name in inside))
    outcomes = {
        checkout: [not text for name, text in inside.items() if name.startswith(f"{checkout}/")]
        for checkout in checkouts
    }
    return {
        "date": date.today().isoformat(),
        "subjects": {
            name: {"scripts": n, "accepted": accepted[name], "without_a_variable": unset[name]}
            for name, n in scripts.most_common()
        },
        "in_scope_accepted_of": {
            name: [sum(accepts), len(accepts)] for name, accepts in outcomes.items()
        },
        "in_scope_refused": {name: refusal for name, refusal in inside.items() if refusal},
    }


if __name__ == "__main__":
    sys.exit(main())
