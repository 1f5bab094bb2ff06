# SPDX-License-Identifier: Apache-2.0
"""``tandem sample RUN PROMPT``: generate with the rollout engine that a run would use."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.api import EngineFailure
from tandem.cli.export import require_no_base, write_model
from tandem.cli.sample import SampleRequest
from tandem.config.schema.rollout import RolloutConfig
from tandem.data.files import RowFault
from tandem.data.images import (
    MARK,
    PictureRule,
    PictureSource,
    expand,
    find_pictures,
    marked,
    measure,
)
from tandem.data.tokenizer import ChatRefused, TextCodec, load_codec
from tandem.driver.model_checks import max_positions
from tandem.driver.notices import configure_logging
from tandem.driver.pictures import reading_rule
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.errors import RunFailure, UserError
from tandem.models.adapters import is_adapter_folder
from tandem.models.folder import ModelFolder, check_folder, open_part
from tandem.models.language_model import LanguageModel
from tandem.models.operators import operators_for
from tandem.models.parallel import WHOLE
from tandem.platforms.record import Platform
from tandem.platforms.select import resolve_dtype, select_platform
from tandem.rollout.factory import EngineSpec, build_engine, require_kernels
from tandem.rollout.feed import with_weights_of
from tandem.types import Completion, FinishReason, GenerationRequest

_KEY = "RUN"
_REMEDY = f"Name files of pictures, and write as many marks {MARK} into PROMPT, or none."


def run(request: SampleRequest) -> int:
    """Print the responses; return 0.

    Raises:
        UserError: the model cannot be loaded or asked.
    """
    configure_logging()
    print(f"loading {request.model}", file=sys.stderr, flush=True)
    platform = select_platform(request.device, key="--device")
    platform.prepare_thread()
    with _hugging_face_folder(request.model, base=request.base) as path:
        folder = check_folder(path, trust_remote_code=request.trusts_remote_code, key=_KEY)
        require_kernels(folder.decoder_config, platform, key=f"{_KEY}={request.model!r}")
        codec = load_codec(
            path,
            template_settings=request.template_settings,
            trust_remote_code=request.trusts_remote_code,
            key=_KEY,
        )
        asked = _asked(request, codec, folder=folder)
        spec = EngineSpec(
            model=_open(folder, platform),
            folder=folder.path,
            config=RolloutConfig(seed=request.seed),
            eos_ids=codec.eos_ids,
            platform=platform,
        )
        completions = _generate(asked, spec)
    _print(completions, codec.decode([completion.token_ids for completion in completions]))
    return 0


def _open(folder: ModelFolder, platform: Platform) -> LanguageModel:
    """Load the model in the precision in which the platform computes."""
    return open_part(
        folder,
        WHOLE,
        dtype=resolve_dtype("auto", platform, key="--device"),
        device=platform.device_type,
        operators=operators_for(platform),
    )


@contextmanager
def _hugging_face_folder(model: str, *, base: Path | None) -> Generator[str, None, None]:
    """Yield a model in the form of Hugging Face; merge adapters and shards in a temporary one."""
    folder = Path(model)
    if not is_adapter_folder(folder):
        require_no_base(folder, base)
        if not (folder / SHARDED_FILE).is_file():
            yield model
            return
    with TemporaryDirectory(prefix="tandem-sample-") as temporary:
        write_model(folder, Path(temporary), base=base)
        yield temporary


def _asked(request: SampleRequest, codec: TextCodec, *, folder: ModelFolder) -> GenerationRequest:
    """Return the request for the engine. Raise UserError if the model cannot take the prompt."""
    is_chat = codec.has_chat_template and not request.is_raw
    text, pictures, rule = request.prompt, (), None
    if request.images:
        rule = reading_rule(folder, request.picture_sizes, codec=codec)
        text, pictures = _with_pictures(request, rule)
    if is_chat:
        try:
            (text,) = codec.render([[{"role": "user", "content": text}]])
        except ChatRefused as error:
            raise UserError(
                "PROMPT",
                request.prompt,
                rule=f"the chat template refuses it ({error})",
                remedy="Use --raw.",
            ) from error
    (ids,) = codec.encode([text], plain=[not is_chat])
    if rule is not None:
        ids = expand(ids, pictures, rule=rule).tolist()
    limit, sampling = max_positions(folder.hf_config), request.sampling
    room = sampling.max_new_tokens if limit is None else limit - len(ids)
    if room < 1:
        raise UserError(
            "PROMPT",
            f"{request.prompt[:20]}...",
            rule=f"it has {len(ids)} tokens, and the model reads at most {limit}, with its answer",
            remedy="Shorten it.",
        )
    longest = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
    read = tuple(picture.read() for picture in pictures)
    numbers = tuple(range(request.num_samples))
    return GenerationRequest(numbers, tuple(ids), longest, pictures=read)


def _with_pictures(
    request: SampleRequest, rule: PictureRule | None
) -> tuple[str, tuple[PictureSource, ...]]:
    """Return the prompt with the model's own text for its pictures, and these, measured.

    Raises:
        UserError: the model does not see, a picture cannot be read, or marks and pictures differ in
            number.
    """
    named = [str(path) for path in request.images]
    value = named[0] if len(named) == 1 else named
    if rule is None:
        raise UserError("--image", value, rule="the model reads text only", remedy="Leave it out.")
    if request.is_raw:
        raise UserError("--image", value, rule="does not go with --raw", remedy="Leave one out.")
    text = request.prompt if MARK in request.prompt else MARK * len(named) + request.prompt
    try:
        found = find_pictures({rule.column: named}, text, rule=rule)
        first = rule.first_id(validation=False)
        measured = measure(found, rule, first_id=first, place="--image")
    except RowFault as fault:
        raise UserError("--image", value, rule=fault.rule, remedy=_REMEDY) from fault
    return marked(text, rule), measured


def _generate(asked: GenerationRequest, spec: EngineSpec) -> list[Completion]:
    """Return the completions in the order of their ids.

    Raises:
        RunFailure: the engine failed.
    """
    completions: dict[int, Completion] = {}
    try:
        with closing(build_engine(spec)) as engine:
            rollout = with_weights_of(spec.model, engine)
            rollout.set_weights_version(0)
            rollout.add([asked])
            while len(completions) < len(asked.sample_ids):
                completions.update({done.sample_id: done for done in rollout.advance()})
    except EngineFailure as failure:
        raise RunFailure(str(failure)) from failure
    return [completions[number] for number in asked.sample_ids]


def _print(completions: Sequence[Completion], texts: Sequence[str]) -> None:
    """Print the responses, and on stderr what is wrong with them."""
    for number, (completion, text) in enumerate(zip(completions, texts, strict=True), start=1):
        if len(texts) > 1:
            print(f"--- {number} of {len(texts)}")
        print(text, flush=True)
        if completion.finish_reason is FinishReason.LENGTH:
            num_tokens = len(completion.token_ids)
            print(f"note: cut off after {num_tokens} tokens (--max-tokens)", file=sys.stderr)
        elif completion.finish_reason is FinishReason.FAILED:
            print("note: the model's logits are not finite from here on", file=sys.stderr)
