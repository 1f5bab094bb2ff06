# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``tandem sample RUN PROMPT``: ask the newest model of a run.

They are checked here, and the model is found, without torch. ``cli.sample_here`` loads it and
generates.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.checkpoint.store import Checkpoint, require_whole
from tandem.cli.trained import find_trained
from tandem.config.parse.json_content import read_object
from tandem.config.schema.data import PictureConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError
from tandem.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The model to ask, the prompt, and how to sample.

    Attributes:
        model: the folder of the model, or its name on the hub.
        num_samples: the number of responses.
        seed: the seed of sampling.
        is_raw: whether the prompt is not put into the chat template.
        device: the platform, as ``trainer.device``.
        template_settings: the arguments of the chat template, as in training.
        trusts_remote_code: whether the model's own code may run. The user says so, because the
            settings beside a checkpoint come with it.
        base: the base model of adapters; None: where it was in training.
        images: the files of the pictures of the prompt.
        picture_sizes: the bounds of their sizes, as in training.
    """

    model: str
    prompt: str
    num_samples: int
    sampling: SamplingParams
    seed: int
    is_raw: bool
    device: str
    template_settings: Mapping[str, Any]
    trusts_remote_code: bool
    base: Path | None
    images: tuple[Path, ...] = ()
    picture_sizes: PictureConfig = PictureConfig()


@dataclass(frozen=True, slots=True)
class _Trained:
    """A model and the settings with which its run sampled; the defaults are for one of no run."""

    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    template_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    picture_sizes: PictureConfig = PictureConfig()


def parse(arguments: Sequence[str]) -> SampleRequest:
    """Return the checked request. Raise UserError if an argument is wrong or there is no model."""
    options = _parser().parse_args(arguments)
    _require(options)
    trained = _find(options.run, options.step)
    temperature = trained.temperature if options.temperature is None else options.temperature
    sampling = SamplingParams(
        temperature=0.0 if options.greedy else temperature,
        top_p=trained.top_p,
        top_k=trained.top_k,
        max_new_tokens=options.max_tokens or trained.max_tokens,
    )
    return SampleRequest(
        model=trained.model,
        prompt=options.prompt,
        num_samples=options.n,
        sampling=sampling,
        seed=options.seed,
        is_raw=options.raw,
        device=options.device,
        template_settings=trained.template_settings,
        trusts_remote_code=options.trust_remote_code,
        base=options.base,
        images=tuple(options.image),
        picture_sizes=trained.picture_sizes,
    )


def _require(options: argparse.Namespace) -> None:
    temperature, limit = options.temperature, options.max_tokens
    _require_prompt(options.prompt)
    if options.n < 1:
        raise UserError("-n", options.n, rule="must be at least 1", remedy="Leave it out for 1.")
    if options.seed < 0:
        raise UserError("--seed", options.seed, rule="must be at least 0", remedy="Leave it out.")
    if limit is not None and limit < 1:
        raise UserError("--max-tokens", limit, rule="must be at least 1", remedy="Leave it out.")
    if temperature is not None and (options.greedy or not temperature > 0):
        raise UserError(
            "--temperature",
            temperature,
            rule="does not go with --greedy" if options.greedy else "must be above 0",
            remedy="Leave it out." if options.greedy else "Use --greedy for the likeliest tokens.",
        )
    if options.greedy and options.n > 1:
        raise UserError(
            "-n",
            options.n,
            rule="greedy responses to one prompt are all the same",
            remedy="Leave out -n or --greedy.",
        )


def _require_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise UserError("PROMPT", prompt, rule="is empty", remedy="Give a text in quotation marks.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python turns bytes that are no UTF-8 into surrogates
        raise UserError(
            "PROMPT", prompt, rule="is not valid UTF-8", remedy="Write the text in UTF-8."
        ) from error


def _find(run: str, step: int | None) -> _Trained:
    """Return the newest model of a run, or a model that belongs to no run."""
    folder = Path(os.path.expanduser(run))
    if step is None and (_is_model(folder) or _is_name(run, folder)):
        return _Trained(run)
    checkpoint = find_trained(folder, step)
    require_whole(checkpoint, use="sample {folder}")
    return _settings_of(checkpoint)


def _is_model(folder: Path) -> bool:
    """Return whether a folder holds a model; config.json of a run or a checkpoint has settings."""
    try:
        return "model_type" in read_object(folder / "config.json")
    except (OSError, ValueError):
        return False


def _is_name(run: str, folder: Path) -> bool:
    """Return whether RUN may be a model on the hub: OWNER/NAME, where OWNER is no local folder."""
    parts = run.split("/")
    return len(parts) == 2 and all(parts) and not folder.exists() and not folder.parent.exists()


def _settings_of(checkpoint: Checkpoint) -> _Trained:
    model, written = str(checkpoint.folder / "actor"), checkpoint.read_config() or {}
    schema = RunConfig if "actor_rollout_ref" in written else SftConfig
    try:
        config = schema.model_validate(written)
    except ValidationError:  # settings of another version of tandem
        return _Trained(model)
    template_settings = config.data.apply_chat_template_kwargs
    if isinstance(config, SftConfig):
        return _Trained(
            model,
            template_settings=template_settings,
            picture_sizes=config.data.mm_processor_kwargs,
        )
    rollout = config.actor_rollout_ref.rollout
    return _Trained(
        model,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        template_settings=template_settings,
        picture_sizes=config.data.mm_processor_kwargs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem sample",
        description="Print what the newest model of a run answers to a prompt. Sampling and chat "
        "template are those of the run unless options say otherwise.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, of a checkpoint or of a model")
    parser.add_argument("prompt", metavar="PROMPT", help="the message of the user")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="picture of the prompt, at its mark <image> or before its text; may be repeated",
    )
    parser.add_argument("-n", type=int, default=1, metavar="N", help="number of responses")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: that of the run")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest tokens")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest response (default: that of the run)"
    )
    parser.add_argument(
        "--raw", action="store_true", help="do not put the prompt into the chat template"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the latest)")
    parser.add_argument(
        "--base", type=Path, help="base model of adapters (default: where it was in training)"
    )
    parser.add_argument("--device", default="auto", help="as trainer.device (default: auto)")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code in the folder of the model (default: not, even if the run did)",
    )
    return parser
