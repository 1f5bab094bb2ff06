# SPDX-License-Identifier: Apache-2.0
"""``tandem export RUN --output FOLDER``: write the trained model of a run as a Hugging Face folder.

With ``--critic``, write its critic. Adapters (LoRA) are merged into their base.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tandem.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint, require_whole
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.engines.sharded_checkpoint import export_sharded
from tandem.errors import UserError
from tandem.models.adapters import is_adapter_folder, merge_adapter
from tandem.models.weights import convert_folder

_DTYPES = ("keep", "bfloat16", "float16", "float32")


def run(arguments: Sequence[str]) -> int:
    """Write the folder and print its path. Raise UserError if the run has no checkpoint."""
    options = _parser().parse_args(arguments)
    checkpoint = _find(options.run, options.step)
    output: Path = options.output
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(
            "--output",
            str(output),
            rule="must be a new or an empty folder",
            remedy="Give another name.",
        )
    dtype = None if options.dtype == "keep" else options.dtype
    folder = checkpoint.folder / ("critic" if options.critic else "actor")
    if not folder.is_dir():
        raise UserError(
            "--critic",
            rule=f"{checkpoint.folder} has no critic",
            remedy="Leave --critic out, or train one with algorithm.adv_estimator=gae.",
        )
    require_whole(checkpoint, use="export {folder}")
    if options.base is not None and not is_adapter_folder(folder):
        raise UserError(
            "--base",
            str(options.base),
            rule=f"{folder} has all weights, and no adapters to merge into a base",
            remedy="Leave --base out.",
        )
    if is_adapter_folder(folder):
        merge_adapter(folder, output, base=options.base, dtype=dtype)
    elif (folder / SHARDED_FILE).is_file():
        export_sharded(folder, output, dtype=dtype)
    else:
        convert_folder(folder, output, dtype=dtype)
    print(output)
    return 0


def _find(run_folder: Path, step: int | None) -> Checkpoint:
    if run_folder.name.startswith("global_step_"):
        if step is not None:
            raise UserError(
                "--step",
                step,
                rule=f"RUN={str(run_folder)!r} is a single checkpoint",
                remedy="Leave --step out, or name the folder of the run.",
            )
        return open_checkpoint(run_folder)
    if step is not None:
        return _checkpoint_of(run_folder, step)
    latest = CheckpointStore(run_folder).latest()
    if latest is None:
        raise UserError(
            "RUN",
            str(run_folder),
            rule="has no checkpoint",
            remedy="Train with trainer.save_freq=-1, which saves the last step, or 1 or more.",
        )
    return latest


def _checkpoint_of(run_folder: Path, step: int) -> Checkpoint:
    folder = run_folder / f"global_step_{step}"
    if not folder.is_dir():
        others = ", ".join(sorted(path.name for path in run_folder.glob("global_step_*")))
        raise UserError(
            "--step",
            step,
            rule=f"{run_folder} has no {folder.name}",
            remedy=f"It has: {others or 'none'}.",
        )
    return open_checkpoint(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem export",
        description="Write the trained model of a run as a Hugging Face folder.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run, or global_step_N")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the latest)")
    parser.add_argument(
        "--critic",
        action="store_true",
        help="write the critic, as token classification",
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--base", type=Path, help="base model of adapters (default: where it was in training)"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="keep", help="precision (default: as trained)"
    )
    return parser
