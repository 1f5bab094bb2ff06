# SPDX-License-Identifier: Apache-2.0
"""The checks of V1 and V3, for an engine of any package over a model of any family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.api import EngineFailure
from tandem.models.file_tensors import is_kept
from tandem.rollout.feed import checkpoint_views
from tandem.testing.contracts.rollout import EngineBench
from tandem.types import FinishReason
from tests.engines.bench import (
    EOS,
    MAX_ERROR,
    largest_error,
    requests,
    transformers_log_probs,
    write_model,
)

_VERSIONS_OF_EXPERTS = 32
"""How many versions a changed expert stays: then each token of the vocabulary was in a canary."""


def check_log_probs(bench: EngineBench, folder: Path) -> None:
    """Log-probs are those of the trainer and of transformers, before and after an update.

    Args:
        folder: an empty folder, into which the weights are saved.
    """
    for version in range(2):
        if version:
            bench.use_new_weights(seed=version)
        asked = requests()
        found = bench.generate(asked)
        assert largest_error(bench, asked, found) <= MAX_ERROR
        for request in asked[:: len(asked) // 3]:  # one of each rule
            one = found[request.sample_ids[0]]
            expected_R = transformers_log_probs(bench.model, folder / str(version), request, one)
            assert one.log_probs == pytest.approx(expected_R.tolist(), abs=MAX_ERROR)


def check_ends(bench: EngineBench) -> None:
    """A response ends with an end token or at its length."""
    asked = requests(n=8)
    found = bench.generate(asked)
    for request in asked:
        length, ignores = request.sampling.max_new_tokens, request.sampling.ignore_eos
        for one in (found[i] for i in request.sample_ids):
            assert 1 <= len(one.token_ids) <= length
            ends = one.token_ids[-1] in EOS and not ignores
            assert one.finish_reason == (FinishReason.STOP if ends else FinishReason.LENGTH)
            assert ends or len(one.token_ids) == length
            assert ignores or not set(one.token_ids[:-1]) & set(EOS)
    reasons = {one.finish_reason for one in found.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}, "both kinds must have been seen"


def check_tensors_that_are_left_out(
    bench: EngineBench, *, names: Sequence[str] | None = None
) -> None:
    """An update without a tensor is refused by its name, for each tensor in turn.

    Args:
        names: the tensors that are left out; None for all.
    """
    check_refusals_by_name(bench, names=names)
    asked = requests()
    assert largest_error(bench, asked, bench.generate(asked)) <= MAX_ERROR


def check_refusals_by_name(bench: EngineBench, *, names: Sequence[str] | None = None) -> None:
    """Leave out one tensor of an update after the other, and then complete the update."""
    sink = bench.engine.sink()
    assert sink is not None
    views = dict(checkpoint_views(bench.model))
    for missing in views if names is None else names:
        bench.version += 1
        sink.begin(bench.version)
        for name, view in views.items():
            if name != missing:
                sink.take(name, view)
        with pytest.raises(EngineFailure, match=f"weights are missing: {missing}$"):
            sink.end()
        sink.take(missing, views[missing])
        sink.end()
        bench.engine.set_weights_version(bench.version)


def check_tensors_that_are_a_tenth_off(bench: EngineBench) -> None:
    """A tensor that changed on its way is seen by the canary, for each tensor in turn."""
    unseen = tensors_that_pass_a_tenth_off(bench)
    assert not unseen, unseen


def tensors_that_pass_a_tenth_off(bench: EngineBench) -> list[str]:
    """Change one tensor of an update after the other, and return those that nothing sees.

    The change is a tenth of the tensor's size, in random directions. A factor would not do: behind
    some norms it has no effect. The correction of a router is changed more, because it only takes
    part in a choice. The tokens of one version may miss an expert: a changed one stays for several.
    """
    views, generator = dict(checkpoint_views(bench.model)), torch.Generator().manual_seed(5)
    unseen: list[str] = []
    for changed, correct in views.items():
        size = correct.square().mean().sqrt() * (100 if is_kept(changed) else 0.1)
        wrong = correct + torch.randn(correct.shape, generator=generator) * size
        is_chosen = ".experts." in changed or is_kept(changed)
        num_versions = _VERSIONS_OF_EXPERTS if is_chosen else 1
        if not any(is_seen(bench, views | {changed: wrong}) for _ in range(num_versions)):
            unseen.append(changed)
    return unseen


def is_seen(bench: EngineBench, views: Mapping[str, Tensor]) -> bool:
    """Return whether an engine refuses to generate with these weights as a new version."""
    sink = bench.engine.sink()
    assert sink is not None
    bench.version += 1
    sink.begin(bench.version)
    for name, view in views.items():
        sink.take(name, view)
    sink.end()
    bench.engine.set_weights_version(bench.version)
    bench.rollout.add([bench.request(0)])
    try:
        bench.rollout.advance()
    except EngineFailure as failure:
        assert "was not loaded as the trainer has it" in str(failure)
        return True
    return False


def write_tied_model_with_a_head(folder: Path, **settings: int) -> Path:
    """Write a model whose head is tied to its embedding, and whose files have another head."""
    write_model(folder, "qwen2 tied", **settings)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def check_versions(bench: EngineBench, *, num_versions: int = 3) -> None:
    """Log-probs are the trainer's under one version after the other."""
    for seed in range(num_versions):
        asked = requests(first_id=100 * seed)
        assert largest_error(bench, asked, bench.generate(asked)) <= MAX_ERROR
        bench.use_new_weights(seed)
