# SPDX-License-Identifier: Apache-2.0
"""``tandem export RUN --output FOLDER``: write the trained model of a run as a Hugging Face folder.

With ``--critic``, write its critic. Adapters (LoRA) are merged into their base.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tandem.checkpoint.store import require_whole
from tandem.cli.trained import find_trained
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.engines.sharded_checkpoint import export_sharded
from tandem.errors import UserError
from tandem.models.adapters import is_adapter_folder, merge_adapter
from tandem.models.weights import convert_folder

_DTYPES = ("keep", "bfloat16", "float16", "float32")


def run(arguments: Sequence[str]) -> int:
    """Write the folder and print its path. Raise UserError if the run has no checkpoint."""
    options = _parser().parse_args(arguments)
    checkpoint = find_trained(options.run, options.step)
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
    if not is_adapter_folder(folder):
        require_no_base(folder, options.base)
    with _removed_on_failure(output):
        write_model(folder, output, base=options.base, dtype=dtype)
    print(output)
    return 0


def require_no_base(folder: Path, base: Path | None) -> None:
    """Raise UserError if a base is given for a folder that has all weights."""
    if base is not None:
        raise UserError(
            "--base",
            str(base),
            rule=f"{folder} has all weights, and no adapters to merge into a base",
            remedy="Leave --base out.",
        )


@contextmanager
def _removed_on_failure(output: Path) -> Iterator[None]:
    """Leave nothing in a folder that was new or empty if it cannot be completed.

    Raises:
        UserError: the disk is full, or may not be written.
    """
    was_there = output.exists()
    try:
        yield
    except BaseException as error:
        for path in output.iterdir() if output.is_dir() else ():
            path.unlink()
        if output.is_dir() and not was_there:
            output.rmdir()
        if isinstance(error, OSError) and _is_of(output, error):
            raise UserError(
                "--output",
                str(output),
                rule=f"cannot be written ({error.strerror or error})",
                remedy="Choose another folder, or free some space.",
            ) from error
        raise


def _is_of(output: Path, error: OSError) -> bool:
    """Return whether an error may come from writing to ``output``, not from reading."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return not names or any(name.startswith(str(output)) for name in names)


def write_model(
    folder: Path, output: Path, *, base: Path | None = None, dtype: str | None = None
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder.

    Args:
        folder: the folder of the model in the checkpoint.
        base: the base of adapters; None: where it was in training.
        dtype: torch's name of a precision; None: as trained.

    Raises:
        UserError: the checkpoint is incomplete, or the base is missing.
    """
    if is_adapter_folder(folder):
        merge_adapter(folder, output, base=base, dtype=dtype)
    elif (folder / SHARDED_FILE).is_file():
        export_sharded(folder, output, dtype=dtype)
    else:
        convert_folder(folder, output, dtype=dtype)


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
