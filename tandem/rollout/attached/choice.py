# SPDX-License-Identifier: Apache-2.0
"""The check of a run's servers before anything is loaded. torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.schema.rollout import RolloutConfig
from tandem.errors import UserError
from tandem.rollout.attached.fit import Misfit, ServerFacts, check_server, require_alike, wanted_of
from tandem.rollout.attached.keys import check_keys, listed_urls
from tandem.rollout.attached.server import Server, ServerLost
from tandem.rollout.vllm.keys import SECTION, URLS


def require_servers(
    config: RolloutConfig, hf_config: Mapping[str, Any], *, max_length: int, num_ranks: int
) -> None:
    """Raise UserError unless all servers answer and can generate for the run.

    Args:
        hf_config: the content of the model's config.json; empty if it is not known.
        max_length: the length of the longest sequence, in tokens.
        num_ranks: the number of processes that generate, each with servers of its own.
    """
    given = config.engine_kwargs.vllm
    check_keys(given, num_ranks=config.tensor_model_parallel_size)
    urls = listed_urls(given)
    if len(urls) < num_ranks:
        raise UserError(
            f"{SECTION}.{URLS}",
            given[URLS],
            rule=f"each of the {num_ranks} processes that generate needs a server of its own, and "
            f"{len(urls)} are listed",
            remedy="List more, or let fewer devices generate (docs/servers.md).",
        )
    wanted = wanted_of(config, hf_config, max_length=max_length)
    first: ServerFacts | None = None
    for url in urls:
        try:
            facts = check_server(Server(url), wanted)
            first = first or facts
            require_alike(facts, first)
        except ServerLost as loss:
            raise UserError(
                f"{SECTION}.{URLS}",
                url,
                rule=f"this server cannot be used: {loss}",
                remedy="Start vllm serve there (docs/servers.md), or leave the URL out.",
            ) from loss
        except Misfit as misfit:
            raise UserError(
                f"{SECTION}.{URLS}", url, rule=misfit.rule, remedy=misfit.remedy
            ) from misfit
