# SPDX-License-Identifier: Apache-2.0
"""Models spread over processes by heads, by tokens and by both equal the whole model: log-probs,
entropies, loss and every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tandem.models.folder import check_folder, open_part
from tandem.models.language_model import LanguageModel, NativeModel
from tandem.models.parallel import WHOLE, ParallelLayout, Peers, is_whole, peers_of, slices_of_rows
from tandem.models.sequence_parallel import gather_tokens, own_tokens
from tandem.types import PackedBatch
from tests.distributed.spawn import run_ranks
from tests.fakes.scoring import score_batch
from tests.unit.models.tiny_models import NATIVE, pack_shared, sample_sequences, write_hf

TOLERANCE = 1e-5
FAMILIES = ("qwen2_tied", "qwen2_untied", "qwen3_biases", "llama_biases_tied")
BATCHES = [
    pack_shared(*sample_sequences()),
    # All response tokens at the end: of four peers some have none of them, and some only padding.
    pack_shared([list(range(20, 36))], [[[7], [5, 8]]]),
    pack_shared([[3]], [[[4]]]),
]


@dataclass(frozen=True)
class Expected:
    """The expected results of the whole model."""

    results: tuple[Tensor, Tensor, Tensor]
    gradients: dict[str, Tensor]


def _layouts() -> dict[str, ParallelLayout]:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "tensor"))
    all_four = init_device_mesh("cpu", (4,))
    tensor, sequence = peers_of(both["tensor"]), peers_of(both["sequence"])
    return {
        "tensor 2": ParallelLayout(tensor=tensor),
        "sequence 2": ParallelLayout(sequence=sequence),
        "sequence 4": ParallelLayout(sequence=peers_of(all_four)),
        "tensor 2, sequence 2": ParallelLayout(tensor=tensor, sequence=sequence),
    }


def _open(folder: Path, layout: ParallelLayout) -> NativeModel:
    model = open_part(check_folder(str(folder)), layout, dtype=torch.float32, device="cpu")
    assert isinstance(model, NativeModel)
    return model


def _results(model: LanguageModel, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and a loss in which every token has a weight of its own.

    Gradients are left in the model.
    """
    model.module.zero_grad()
    scores = score_batch(model, batch, temperature=0.7, with_entropy=True)
    assert scores.entropy_R is not None
    weight_2R = torch.randn((2, len(batch.target_R)), generator=torch.Generator().manual_seed(1))
    loss = (weight_2R[0] * scores.score_R.exp() + weight_2R[1] * scores.entropy_R).sum()
    loss.backward()
    return scores.score_R.detach(), scores.entropy_R.detach(), loss.detach()


def _gradients(model: LanguageModel) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.module.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.clone()
    return gradients


def _compare(whole: Expected, part: NativeModel, *, batch: PackedBatch, case: str) -> None:
    actual = _results(part, batch)
    for one, other in zip(actual, whole.results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE, msg=case)
    with torch.no_grad():
        scored = score_batch(part, batch, temperature=0.7, with_entropy=False)
    assert torch.equal(scored.score_R, actual[0]), case
    found, regions = _summed(_gradients(part), part.layout.sequence), part.regions()
    _require_alike({n: x for n, x in found.items() if is_whole(regions[n])}, part.layout.tensor)
    for held in (held for n, x in found.items() for held in slices_of_rows(regions[n], x)):
        wanted, spec = whole.gradients[held.spec.name], held.spec
        box = tuple(slice(o, o + n) for o, n in zip(spec.offset, spec.size, strict=True))
        atol = TOLERANCE * max(1.0, float(wanted.abs().max()))
        message = f"{case}: gradient of {spec.name}"
        torch.testing.assert_close(held.tensor, wanted[box], rtol=0, atol=atol, msg=message)


def _summed(gradients: dict[str, Tensor], peers: Peers) -> dict[str, Tensor]:
    if peers.size == 1:
        return gradients
    together = _flat(gradients)
    dist.all_reduce(together, group=peers.group)
    parts = together.split([gradient.numel() for gradient in gradients.values()])
    return {n: x.view_as(gradients[n]) for n, x in zip(gradients, parts, strict=True)}


def _require_alike(gradients: dict[str, Tensor], peers: Peers) -> None:
    """Check equality bit by bit, without which replicas would drift apart."""
    if peers.size > 1:
        ours = _flat(gradients)
        theirs = [torch.empty_like(ours) for _ in range(peers.size)]
        dist.all_gather(theirs, ours, group=peers.group)
        assert all(torch.equal(other, ours) for other in theirs), "peers hold other gradients"


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def _check_equal(rank: int, size: int, store_port: int, folders: dict[str, Path]) -> int:
    layouts, checked = _layouts(), 0
    for family, folder in folders.items():
        whole = _open(folder, WHOLE)
        parts = {name: _open(folder, layout) for name, layout in layouts.items()}
        for number, batch in enumerate(BATCHES if family == FAMILIES[0] else BATCHES[:1]):
            expected = Expected(_results(whole, batch), _gradients(whole))
            for name, part in parts.items():
                part.set_gradient_checkpointing(number != 1)
                _compare(expected, part, batch=batch, case=f"{family}, {name}, batch {number}")
                checked += 1
    return checked


def test_results_and_gradients_equal_those_of_the_whole_model(tmp_path: Path) -> None:
    folders = {case: tmp_path / case for case in FAMILIES}
    for case, folder in folders.items():
        write_hf(NATIVE[case](), folder)
    num_batches = len(BATCHES) + len(FAMILIES) - 1
    assert run_ranks(_check_equal, 4, folders) == [4 * num_batches] * 4


def _gathered_routes(rank: int, size: int, store_port: int) -> Tensor:
    routes_TLK = torch.arange(7 * 2 * 3, dtype=torch.int16).view(7, 2, 3) + 300
    peers = peers_of(init_device_mesh("cpu", (size,)))
    return gather_tokens(own_tokens(routes_TLK, peers), peers, num_tokens=7)


def test_mo8_routes_among_more_than_256_experts_are_gathered() -> None:
    expected = torch.arange(7 * 2 * 3, dtype=torch.int16).view(7, 2, 3) + 300
    for found in run_ranks(_gathered_routes, 2):
        assert torch.equal(found, expected)
