# SPDX-License-Identifier: Apache-2.0
"""The check of a server: whether it is a vLLM of a tested version, with tandem's plug-in, for the
model of the run.

It reads what the server says of itself, and changes nothing there. torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tandem.api import EngineFailure
from tandem.config.schema.rollout import RolloutConfig
from tandem.rollout.attached.messages import WorkerCall, receive_message
from tandem.rollout.attached.protocol import BACKEND, LOGPROBS_MODE, PROCESSOR, PROTOCOL, SIZES
from tandem.rollout.attached.server import CALL_S, KeyWanted, Server, ServerLost
from tandem.rollout.vllm.keys import ALLOW_UNTESTED, SECTION

VERSIONS = ">=0.32,<0.33"
"""The versions of vLLM whose servers have been tested. Older ones do not name the weights of a
token."""
CANARY_LENGTH = 16
"""The tokens of a canary, as in ``rollout.canary``, which imports torch."""
ANSWER_S = 10.0
"""How long a server may take to answer at all."""
_INFO_S = 120.0
"""How long a server may take to describe itself, which it prepares at the first request."""
_PAGE = "docs/servers.md has the whole command."


class Misfit(Exception):
    """A server that answers and cannot generate for the run.

    Attributes:
        rule: what is wrong, without a full stop.
        remedy: what to change.
    """

    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(f"{rule}. {remedy}")
        self.rule, self.remedy = rule, remedy


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts that a server states.

    Attributes:
        version: the version of vLLM.
        dtype: the precision in which it computes, e.g. ``bfloat16``.
        num_workers: the number of its processes that hold weights.
        is_started: whether it waits for the end of an update, which another run has left.
    """

    version: str
    dtype: str
    num_workers: int
    is_started: bool = False

    def __str__(self) -> str:
        workers = f"{self.num_workers} device{'s' if self.num_workers != 1 else ''}"
        return f"vLLM {self.version}, {self.dtype}, {workers}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The needs of a run.

    Attributes:
        num_seqs: the number of samples that one server generates at once.
        length: the length of the longest sequence in tokens; None if it is not known.
        hf_config: the content of the model's config.json; empty if it is not known.
        allows_untested: whether any version of vLLM will do.
    """

    num_seqs: int
    length: int | None
    hf_config: Mapping[str, Any]
    allows_untested: bool


def check_server(server: Server, wanted: Wanted) -> ServerFacts:
    """Return the facts of a server.

    Raises:
        ServerLost: it does not answer.
        Misfit: it cannot generate for the run.
    """
    try:
        version = server.get("/version", timeout_s=ANSWER_S)["version"]
    except (EngineFailure, TypeError, KeyError) as error:
        rule, remedy = "no server of vLLM answers there", "Give the URL of vllm serve."
        raise _misfit_of(error, rule, remedy=remedy) from error
    _require_version(version, wanted)
    try:
        info = server.get("/server_info", timeout_s=_INFO_S, query={"config_format": "json"})
        world = server.get("/get_world_size")
    except EngineFailure as error:
        raise _misfit_of(
            error,
            "its routes for training are off",
            remedy=f"Start vllm serve with VLLM_SERVER_DEV_MODE=1 in its environment. {_PAGE}",
        ) from error
    try:
        found = info["vllm_config"]
        _require_flags(found)
        _require_route(server)
        _require_room(found, wanted)
        num_workers = int(world["world_size"])
        told = _ask_plugin(server, num_workers)
        for one in told:
            _require_model(one, wanted)
        is_started = any(one["is_started"] for one in told)
        return ServerFacts(version, told[0]["dtype"], num_workers, is_started)
    except (LookupError, TypeError, ValueError) as error:
        raise Misfit(
            f"it describes itself in a form that is not known ({error!r})",
            f"Install vLLM {VERSIONS} there.",
        ) from error


def require_alike(facts: ServerFacts, first: ServerFacts) -> None:
    """Raise Misfit unless a server computes in the precision of the first one.

    Otherwise the tokens of a sample would depend on the server that draws them.
    """
    if facts.dtype != first.dtype:
        raise Misfit(
            f"it computes in {facts.dtype}, and the first server in {first.dtype}",
            f"Start vllm serve with --dtype {first.dtype}.",
        )


def fit_of(
    config: RolloutConfig, folder: Path, *, max_length: int | None
) -> Callable[[Server], ServerFacts]:
    """Return the check of the servers of a run.

    Args:
        folder: the model's folder.
    """
    path = folder / "config.json"
    hf_config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    wanted = wanted_of(config, hf_config, max_length=max_length)
    return lambda server: check_server(server, wanted)


def wanted_of(
    config: RolloutConfig, hf_config: Mapping[str, Any], *, max_length: int | None
) -> Wanted:
    """Return what the servers of a run must have."""
    untested = bool(config.engine_kwargs.vllm.get(ALLOW_UNTESTED, False))
    return Wanted(config.max_num_seqs, max_length, hf_config, untested)


def _misfit_of(error: Exception, rule: str, *, remedy: str) -> Misfit:
    """Return what a refused request means: ``rule``, unless the server asks for a key."""
    if isinstance(error, KeyWanted):
        rule = "it asks for an API key, and tandem sends none"
        return Misfit(rule, "Start vllm serve without --api-key (VLLM_API_KEY).")
    return Misfit(rule, remedy)


def _require_version(version: str, wanted: Wanted) -> None:
    try:
        is_tested = SpecifierSet(VERSIONS).contains(Version(version).base_version)
    except InvalidVersion:
        is_tested = False
    if not is_tested and not wanted.allows_untested:
        raise Misfit(
            f"it runs vLLM {version}, and {VERSIONS} is supported",
            f"Install another version there, or set {SECTION}.{ALLOW_UNTESTED}=True.",
        )


def _require_flags(found: Mapping[str, Any]) -> None:
    model, transfer = found["model_config"], found.get("weight_transfer_config") or {}
    processors = model.get("logits_processors") or ()
    flags = {
        f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\'': (
            transfer.get("backend") == BACKEND
        ),
        f"--logits-processors {PROCESSOR}": PROCESSOR in processors,
        f"--logprobs-mode {LOGPROBS_MODE}": model.get("logprobs_mode") == LOGPROBS_MODE,
        "--no-async-scheduling": not found["scheduler_config"].get("async_scheduling"),
    }
    missing = [flag for flag, is_set in flags.items() if not is_set]
    if missing:
        raise Misfit("it was started without tandem's settings", f"Add {missing[0]}. {_PAGE}")
    if found.get("speculative_config") is not None:
        rule = "it drafts tokens (speculative decoding), and tandem draws them itself"
        raise Misfit(rule, "Leave --speculative-config out.")
    cache = found.get("cache_config") or {}
    if found.get("kv_transfer_config") is not None or cache.get("kv_offloading_size"):
        rule = "it has a cache outside of vLLM, which keeps keys and values of old weights"
        raise Misfit(rule, "Leave --kv-transfer-config and --kv-offloading-size out.")


def _ask_plugin(server: Server, num_workers: int) -> Sequence[Mapping[str, Any]]:
    """Let the plug-in in the server's workers connect to this process, and say what they compute.

    Each update of weights needs such a connection.

    Returns:
        what each worker says.
    """
    try:
        call = WorkerCall(
            server,
            "/init_weight_transfer_engine",
            field="init_info",
            num_workers=num_workers,
            silence_s=CALL_S,
        )
        try:
            told = [receive_message(channel) for channel in call.channels]
            call.finish()
        finally:
            call.close()
    except (EngineFailure, ServerLost, OSError) as error:
        raise Misfit(
            f"tandem's plug-in there cannot be reached: {error}",
            f"Its workers connect to this machine; see its log. {_PAGE}",
        ) from error
    return told


def _require_model(told: Mapping[str, Any], wanted: Wanted) -> None:
    if told.get("protocol") != PROTOCOL:
        raise Misfit(
            "another version of tandem is installed there", "Install the same version in both."
        )
    if not told["is_whole"]:
        raise Misfit(
            "a version of weights did not arrive whole there, and its model is half replaced",
            "Start it again.",
        )
    if not told["draws"]:
        raise Misfit(
            "its second model runner does not let tandem draw tokens",
            "Start vllm serve with VLLM_USE_V2_MODEL_RUNNER=0 in its environment.",
        )
    for name in SIZES:
        own, theirs = wanted.hf_config.get(name), told["model"].get(name)
        if own is not None and theirs is not None and theirs != own:
            raise Misfit(
                f"it serves another model: its {name} is {theirs}, and the run's {own}",
                "Start vllm serve with the model of the run.",
            )


def _require_room(found: Mapping[str, Any], wanted: Wanted) -> None:
    length = found["model_config"]["max_model_len"]
    needed = max(wanted.length or 0, CANARY_LENGTH)
    if length < needed:
        raise Misfit(
            f"its sequences have at most {length} tokens, and those of the run {needed} "
            "(data.max_prompt_length + data.max_response_length)",
            f"Start vllm serve with --max-model-len {needed}.",
        )
    num_seqs, wants = found["scheduler_config"]["max_num_seqs"], wanted.num_seqs + 1
    if num_seqs < wants:
        raise Misfit(
            f"it generates {num_seqs} sequences at once, and the run needs {wants} "
            "(rollout.max_num_seqs, and one more to check new weights)",
            f"Start vllm serve with --max-num-seqs {wants}, or lower rollout.max_num_seqs.",
        )


def _require_route(server: Server) -> None:
    """Raise Misfit if the route that takes tokens is off."""
    try:
        server.post("/inference/v1/abort_requests", {"request_ids": []})
    except EngineFailure as error:
        remedy = f"Start vllm serve with --enable-scale-out. {_PAGE}"
        raise _misfit_of(error, "it takes no token ids as prompts", remedy=remedy) from error
    except ServerLost as error:
        raise Misfit(f"it cannot abort requests: {error}", _PAGE) from error
