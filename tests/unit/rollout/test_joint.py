# SPDX-License-Identifier: Apache-2.0
"""Engines of several policies over one base generate in joint passes what each generates alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.api import EngineFailure
from tandem.models.adapted import base_weights
from tandem.models.folder import adapt_folder, check_folder, fill_adapters, open_model
from tandem.models.language_model import NativeModel
from tandem.rollout.joint import JointMember, JointPasses
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.fakes.tiny_adapters import ALL, spread_b
from tests.unit.models.tiny_models import NATIVE, write_hf

KINDS = (
    ALL,
    replace(ALL, rank=2, alpha=32.0),
    replace(ALL, targets=("q_proj", "down_proj")),
)
"""Adapters of several ranks and maps."""
CONFIG = NativeRolloutConfig(
    seed=3, eos_ids=(0,), max_num_seqs=6, max_num_batched_tokens=64, max_cache_bytes=1 << 24
)
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=9)
Wrap = Callable[[int, NativeModel], NativeRolloutEngine]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[NativeModel]:
    """Policies with other adapters over the storage of one base."""
    folder = tmp_path_factory.mktemp("joint")
    write_hf(NATIVE["qwen3_biases"](), folder)
    base = open_model(str(folder), dtype=torch.float32, device="cpu")
    assert isinstance(base, NativeModel)
    found: list[NativeModel] = []
    for seed, adapters in enumerate(KINDS):
        adapted = adapt_folder(check_folder(str(folder)), adapters, seed=seed)
        assert adapted.decoder_config is not None
        model = base.with_new_adapters(adapted.decoder_config, torch.float32)
        with torch.no_grad():
            fill_adapters(adapted, model.trained_slices())
        spread_b(model, seed=10 + seed)
        found.append(model)
    return found


def test_policies_over_a_base_share_its_storage(policies: list[NativeModel]) -> None:
    places = [{n: w.data_ptr() for n, w in base_weights(p.decoder).items()} for p in policies]
    assert places[0] == places[1] == places[2]


def alone(_: int, policy: NativeModel) -> NativeRolloutEngine:
    return NativeRolloutEngine(policy.decoder, CONFIG)


def requests(policy: int) -> list[GenerationRequest]:
    """Return requests of other lengths for each policy, with a prompt that all have."""
    prompts = [(5, 6, 7, 8), *(tuple(range(3, 5 + policy + n)) for n in range(3))]
    return [
        GenerationRequest((10 * n, 10 * n + 1), prompt, SAMPLING)
        for n, prompt in enumerate(prompts[: 4 - policy])
    ]


def generate(
    index: int, policy: NativeModel, wrap: Wrap, *, leave: Callable[[], None] = lambda: None
) -> list[Completion]:
    """Generate for two versions of the weights, as a run of two steps does."""
    engine = wrap(index, policy)
    found: list[Completion] = []
    for version in range(2):
        engine.set_weights_version(version)
        engine.add(requests(index))
        while finished := engine.advance():
            found += finished
    leave()
    return sorted(found, key=lambda completion: completion.sample_id)


def together(policies: Sequence[NativeModel]) -> list[list[Completion]]:
    passes = JointPasses(len(policies))

    def run(index: int) -> list[Completion]:
        member = JointMember(passes, index)

        def wrap(_: int, policy: NativeModel) -> NativeRolloutEngine:
            substitute = member.join(policy.decoder)
            return NativeRolloutEngine(policy.decoder, CONFIG, substitute=substitute)

        return generate(index, policies[index], wrap, leave=member.leave)

    with ThreadPoolExecutor(len(policies)) as threads:
        return list(threads.map(run, range(len(policies))))


def test_joint_passes_give_each_policy_its_own_results(policies: list[NativeModel]) -> None:
    expected = [generate(index, policy, alone) for index, policy in enumerate(policies)]
    found = together(policies)
    assert len({tuple(c.token_ids) for c in expected[0]}) > 3, "the policies say something"
    for mine, own in zip(found, expected, strict=True):
        assert [c.token_ids for c in mine] == [c.token_ids for c in own]
        for one, other in zip(mine, own, strict=True):
            # Products over other numbers of rows are summed in another order.
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert together(policies) == found, "the speed of threads changes no bit"


def test_a_single_policy_computes_the_same_bits(policies: list[NativeModel]) -> None:
    assert together(policies[:1]) == [generate(0, policies[0], alone)]


def waiting(policy: NativeModel, member: JointMember) -> Future[Tensor]:
    """Start a pass on a thread that ends with it."""
    future: Future[Tensor] = Future()

    def compute() -> None:
        tokens = torch.tensor([3, 4])
        try:
            ask = member.join(policy.decoder)
            future.set_result(ask(tokens, torch.arange(2), lambda _, q, k, v: q))
        except (EngineFailure, RuntimeError) as error:
            future.set_exception(error)

    threading.Thread(target=compute, daemon=True).start()
    return future


def test_a_policy_that_leaves_is_not_waited_for(policies: list[NativeModel]) -> None:
    passes = JointPasses(2)
    first = waiting(policies[0], JointMember(passes, 0))
    assert not first.done()
    JointMember(passes, 1).leave()
    assert first.result(timeout=60).shape[0] == 2


def test_an_abort_ends_the_waits(policies: list[NativeModel]) -> None:
    passes = JointPasses(2)
    first = waiting(policies[0], JointMember(passes, 0))
    passes.abort("the sweep was stopped")
    with pytest.raises(EngineFailure, match="the sweep was stopped"):
        first.result(timeout=60)


def test_a_pass_that_fails_fails_for_all(policies: list[NativeModel]) -> None:
    passes = JointPasses(2)
    first = waiting(policies[0], JointMember(passes, 0))

    def broken(*_: object) -> Tensor:
        raise RuntimeError("no memory")

    ask = JointMember(passes, 1).join(policies[1].decoder)
    with pytest.raises((RuntimeError, EngineFailure), match="no memory"):
        ask(torch.tensor([3]), torch.arange(1), broken)
    with pytest.raises((RuntimeError, EngineFailure), match="no memory"):
        first.result(timeout=60)
