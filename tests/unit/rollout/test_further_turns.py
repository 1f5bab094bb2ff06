# SPDX-License-Identifier: Apache-2.0
"""Three turns of a sample in both native engines against full forward passes (M3).

The tokens are those that one seed draws without any engine, and each log-prob is the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tandem.api import RolloutEngine
from tandem.data.packing import TrainSequence, pack
from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.platforms.capture import eager
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.engine import WINDOW_TOKENS, PagedRolloutEngine
from tandem.rollout.sampler import DrawRule, draw_tokens
from tandem.types import Completion, GenerationRequest, SamplingParams, Span, Trajectory
from tests.fakes.draining import drain_by_sample
from tests.fakes.tiny_decoder import tiny_decoder

VOCABULARY, SEED, EOS = 40, 11, (0, 1, 2, 3)
PAGE = 8
"""Tokens of a page: turns begin and end within pages."""
SAMPLED = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=24)
GIVEN = ((7, 8, 9), (30, 5))
PROMPTS = {1: (5, 6, 7, 8), 2: (9,), 3: (12, 13, 14, 15, 16, 17, 18)}
CONFIG = NativeRolloutConfig(
    seed=SEED,
    eos_ids=EOS,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_cache_bytes=256 * 2 * 2 * PAGE_TOKENS * 16 * 4,
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder(
        vocab_size=VOCABULARY, num_heads=3, num_kv_heads=1, head_dim=16, tie_embeddings=False
    )


def engine_of(
    name: str, decoder: Decoder, config: NativeRolloutConfig = CONFIG
) -> NativeRolloutEngine | PagedRolloutEngine:
    if name == "native":
        return NativeRolloutEngine(decoder, config)
    return PagedRolloutEngine(
        decoder, config, make_capturer=eager, num_multiprocessors=1, page_tokens=PAGE
    )


ENGINES = pytest.mark.parametrize("name", ["native", "paged"])


def play(engine: RolloutEngine) -> dict[int, Trajectory]:
    """Three turns of each sample; turns of several samples share the batch."""
    spans: dict[int, list[Span]] = {key: [Span(prompt)] for key, prompt in PROMPTS.items()}
    for turn in range(3):
        engine.add([request_of(key, spans[key]) for key in spans])
        for key, completion in drain_by_sample(engine).items():
            spans[key].append(Span(completion.token_ids, completion))
            if turn < 2:
                spans[key].append(Span(GIVEN[turn]))
    return {key: Trajectory(key, tuple(of_one)) for key, of_one in spans.items()}


def request_of(sample_id: int, spans: list[Span]) -> GenerationRequest:
    ids = tuple(chain.from_iterable(span.token_ids for span in spans))
    drawn = len(ids) - len(PROMPTS[sample_id])
    sampling = replace(SAMPLED, max_new_tokens=min(6, SAMPLED.max_new_tokens - drawn))
    return GenerationRequest((sample_id,), ids, sampling, first_index=drawn, continues=True)


def hidden(decoder: Decoder, ids: tuple[int, ...]) -> torch.Tensor:
    packed = pack([TrainSequence(0, ids, (0,))])
    return decoder(packed.token_ids_T, packed.position_ids_T, PackedAttention(packed.segments))


@torch.no_grad()
def drawn_without_an_engine(decoder: Decoder, sample_id: int) -> list[int]:
    """Each token from a full forward pass and the number of its index in the response."""
    ids = PROMPTS[sample_id]
    key = stream_keys(SEED, [sample_id])
    for turn in range(3):
        for _ in range(6):
            index = len(ids) - len(PROMPTS[sample_id])
            logits = F.linear(hidden(decoder, ids)[-1:], decoder.lm_head_weight)
            uniform = uniforms(key, torch.tensor([[index]]))[0]
            ids = (*ids, int(draw_tokens(logits, uniform, rule=DrawRule.of(SAMPLED)).token_B))
            if ids[-1] in EOS:
                break
        ids = (*ids, *(GIVEN[turn] if turn < 2 else ()))
    return list(ids[len(PROMPTS[sample_id]) :])


@ENGINES
@torch.no_grad()
def test_m3_three_turns_draw_the_tokens_of_full_passes_with_the_trainers_log_probs(
    decoder: Decoder, name: str
) -> None:
    trajectories = play(engine_of(name, decoder))
    for sample_id, trajectory in trajectories.items():
        assert list(trajectory.response_ids) == drawn_without_an_engine(decoder, sample_id)
        sequence = TrainSequence(
            sample_id,
            trajectory.prompt_ids,
            trajectory.response_ids,
            trajectory.loss_mask,
        )
        packed = pack([sequence])
        attention = PackedAttention(packed.segments)
        h_TD = decoder(packed.token_ids_T, packed.position_ids_T, attention)
        logits_RV = F.linear(h_TD[packed.source_R], decoder.lm_head_weight)
        logp_R = logits_RV.log_softmax(-1).gather(1, packed.target_R[:, None])[:, 0]
        drawn = [logp for one in trajectory.completions for logp in one.log_probs]
        assert drawn == pytest.approx(logp_R.tolist(), abs=5e-5)
        assert all(isinstance(one, Completion) for one in trajectory.completions)


def play_turns(
    engine: RolloutEngine, num_turns: int, *, between: Callable[[int], None] = lambda turn: None
) -> dict[int, list[int]]:
    """Return all tokens of each sample after some turns of two tokens, with four given between."""
    ids = {key: list(prompt) for key, prompt in PROMPTS.items()}
    for turn in range(num_turns):
        between(turn)
        sampling = replace(SAMPLED, max_new_tokens=2, ignore_eos=True)
        engine.add(
            [
                GenerationRequest(
                    (key,),
                    tuple(ids[key]),
                    sampling,
                    first_index=len(ids[key]) - len(PROMPTS[key]),
                    continues=True,
                )
                for key in ids
            ]
        )
        for key, completion in drain_by_sample(engine).items():
            ids[key] += [*completion.token_ids, 20 + turn, 4, 5, 6]
    return ids


@pytest.fixture(scope="module")
def computed_anew(decoder: Decoder) -> dict[int, list[int]]:
    """Return the tokens of six turns, each of which another engine draws."""
    engines = iter([NativeRolloutEngine(decoder, CONFIG) for _ in range(6)])

    class Fresh:
        def add(self, requests: list[GenerationRequest]) -> None:
            self.engine = next(engines)
            self.engine.add(requests)

        def advance(self, max_steps: int | None = None) -> list[Completion]:
            return self.engine.advance(max_steps)

    return play_turns(Fresh(), 6)  # type: ignore[arg-type]


@ENGINES
def test_m22_further_turns_compute_only_the_tokens_that_they_lack(
    decoder: Decoder, computed_anew: dict[int, list[int]], name: str
) -> None:
    engine = engine_of(name, decoder)
    if isinstance(engine, PagedRolloutEngine):
        engine._scheduler.wanted_pages = 64  # as if first turns might have been as long as all six
    assert play_turns(engine, 6) == computed_anew
    num_prompt = sum(map(len, PROMPTS.values()))
    # The newest token of a turn is computed with what is given after it.
    assert engine.num_prefilled_tokens == num_prompt + len(PROMPTS) * 5 * (4 + 1)
    assert engine.metrics()["num_kept_tokens"] > 0


@ENGINES
def test_without_kept_turns_each_turn_is_computed_whole_and_draws_the_same(
    decoder: Decoder, computed_anew: dict[int, list[int]], name: str
) -> None:
    engine = engine_of(name, decoder, replace(CONFIG, keeps_turns=False))
    assert play_turns(engine, 6) == computed_anew
    # A turn draws two tokens, and four are given after it.
    lengths = (len(prompt) + 6 * turn for prompt in PROMPTS.values() for turn in range(6))
    assert engine.num_prefilled_tokens == sum(lengths)
    assert engine.metrics()["num_kept_tokens"] == 0


@pytest.mark.parametrize(
    ("name", "num_tokens"), [("native", 1), ("native", 60), ("native", 90), ("paged", 72)]
)
def test_m22_states_give_way_to_rows_and_are_computed_again(
    decoder: Decoder, computed_anew: dict[int, list[int]], name: str, num_tokens: int
) -> None:
    bytes_per_token = CONFIG.max_cache_bytes // (256 * PAGE_TOKENS)
    small = replace(CONFIG, max_cache_bytes=num_tokens * bytes_per_token)
    engine = engine_of(name, decoder, small)
    assert play_turns(engine, 6) == computed_anew
    num_kept = (5 * (4 + 1) + 7) * len(PROMPTS)
    assert engine.num_prefilled_tokens > num_kept
    assert 0 <= engine.metrics()["num_kept_tokens"] < sum(map(len, computed_anew.values())) * 2


@ENGINES
@pytest.mark.parametrize("keeps_cache", [False, True])
def test_m3_states_of_earlier_weights_are_kept_only_with_a_kept_cache(
    decoder: Decoder, computed_anew: dict[int, list[int]], name: str, keeps_cache: bool
) -> None:
    """The weights stay the same here, so that the tokens do too."""
    engine = engine_of(name, decoder, replace(CONFIG, keeps_cache=keeps_cache))
    ids = play_turns(engine, 6, between=lambda turn: assert_taken(engine, turn))
    assert ids == computed_anew
    num_kept = engine.metrics()["num_kept_tokens"]
    assert num_kept > 0 if keeps_cache else num_kept == 0


NUM_TURNS = 3


def play_with_new_weights(name: str, *, keeps_cache: bool, is_fresh: bool) -> dict[int, list[int]]:
    """Return the tokens of turns before each of which the weights change, as in a tool's wait.

    Args:
        is_fresh: whether another engine draws each turn.
    """
    decoder = tiny_decoder(
        vocab_size=VOCABULARY, num_heads=3, num_kv_heads=1, head_dim=16, tie_embeddings=False
    )
    engines = [
        engine_of(name, decoder, replace(CONFIG, keeps_cache=keeps_cache))
        for _ in range(NUM_TURNS if is_fresh else 1)
    ]

    for engine in engines:
        if isinstance(engine, PagedRolloutEngine):
            engine._scheduler.wanted_pages = 64  # growing would give up what is kept

    class Turns:
        def add(self, requests: list[GenerationRequest]) -> None:
            engines[0].add(requests)

        def advance(self, max_steps: int | None = None) -> list[Completion]:
            return engines[0].advance(max_steps)

    def change(turn: int) -> None:
        generator = torch.Generator().manual_seed(turn)
        with torch.no_grad():
            for weight in decoder.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        if is_fresh and turn > 0:
            engines.pop(0)
        assert_taken(engines[0], turn + 1)

    return play_turns(Turns(), NUM_TURNS, between=change)  # type: ignore[arg-type]


def test_m3_weights_that_change_in_each_wait_give_the_tokens_of_engines_that_keep_nothing() -> None:
    """With ``keep_cache``, both engines read the same keys of earlier weights."""
    anew = play_with_new_weights("native", keeps_cache=False, is_fresh=True)
    for name in ("native", "paged"):
        assert play_with_new_weights(name, keeps_cache=False, is_fresh=False) == anew
    kept = play_with_new_weights("native", keeps_cache=True, is_fresh=False)
    assert kept != anew, "the weights have changed too little to be seen"
    assert play_with_new_weights("paged", keeps_cache=True, is_fresh=False) == kept


class Versions:
    """A decoder whose weights at each version are known."""

    def __init__(self) -> None:
        self.decoder = tiny_decoder(
            vocab_size=VOCABULARY, num_heads=3, num_kv_heads=1, head_dim=16, tie_embeddings=False
        )
        self._first = [weight.detach().clone() for weight in self.decoder.parameters()]

    @torch.no_grad()
    def use(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        for weight, first in zip(self.decoder.parameters(), self._first, strict=True):
            weight.copy_(first + 0.1 * torch.randn(first.shape, generator=generator))


def play_with_switches(name: str, versions: Versions) -> dict[int, list[Span]]:
    """Two turns of each sample; the weights change whenever the engine has drawn some tokens."""
    prompts, steps, length = PROMPTS, 2, 6
    if name == "paged":  # draws tokens in windows, and reads one while it draws the next
        prompts, steps, length = {2: PROMPTS[2]}, WINDOW_TOKENS, 3 * WINDOW_TOKENS
    versions.use(0)
    engine = engine_of(name, versions.decoder)
    if isinstance(engine, PagedRolloutEngine):
        engine._scheduler.wanted_pages = 64  # growing would give up what is kept
    spans = {key: [Span(prompt)] for key, prompt in prompts.items()}
    version = 0
    for turn in range(2):
        sampling = replace(SAMPLED, max_new_tokens=length, ignore_eos=True)
        for key, said in spans.items():
            engine.add([replace(request_of(key, said), sampling=sampling)])
        ended: dict[int, Completion] = {}
        while len(ended) < len(prompts):
            ended.update({one.sample_id: one for one in engine.advance(max_steps=steps)})
            version += 1
            versions.use(version)
            assert_taken(engine, version)
        for key, completion in ended.items():
            spans[key] += [Span(completion.token_ids, completion), Span(GIVEN[turn])]
    return spans


@pytest.mark.parametrize("name", ["native", pytest.param("paged", marks=pytest.mark.deep)])
@torch.no_grad()
def test_m3_weights_that_change_within_a_turn_draw_what_their_version_draws(name: str) -> None:
    """Each token is that of a full pass with the weights of the version that it carries."""
    versions = Versions()
    for key, spans in play_with_switches(name, versions).items():
        ids: tuple[int, ...] = ()
        for span in spans:
            completion = span.completion
            if completion is None:
                ids = (*ids, *span.token_ids)
                continue
            assert completion.switches, "the weights change within each turn"
            carried = [v for v, length in completion.version_runs for _ in range(length)]
            drawn = zip(completion.token_ids, completion.log_probs, carried, strict=True)
            for token, logp, version in drawn:
                versions.use(version)
                h_TD = hidden(versions.decoder, ids)
                logits = F.linear(h_TD[-1:], versions.decoder.lm_head_weight)
                index = torch.tensor([[len(ids) - len(PROMPTS[key])]])
                uniform = uniforms(stream_keys(SEED, [key]), index)[0]
                draw = draw_tokens(logits, uniform, rule=DrawRule.of(SAMPLED))
                assert int(draw.token_B) == token
                assert logp == pytest.approx(float(draw.logp_B), abs=5e-5)
                ids = (*ids, token)


def assert_taken(engine: RolloutEngine, version: int) -> None:
    assert engine.set_weights_version(version)


@ENGINES
def test_a_history_that_was_rewritten_is_computed_from_its_first_token(
    decoder: Decoder, name: str
) -> None:
    engine = engine_of(name, decoder)
    once = replace(SAMPLED, max_new_tokens=2, ignore_eos=True)
    engine.add([GenerationRequest((1,), (5, 6, 7, 8), once, continues=True)])
    drain_by_sample(engine)
    before = engine.num_prefilled_tokens
    engine.add([GenerationRequest((1,), (5, 6, 9, 9, 9, 9, 9), once, continues=True)])
    drain_by_sample(engine)
    assert engine.num_prefilled_tokens - before == 7


def num_kept(engine: NativeRolloutEngine | PagedRolloutEngine) -> int:
    if isinstance(engine, NativeRolloutEngine):
        return engine._shelf.num_tokens
    return len(engine._scheduler.parking)


@ENGINES
def test_single_turns_keep_nothing(decoder: Decoder, name: str) -> None:
    engine = engine_of(name, decoder)
    engine.add([GenerationRequest((1, 2), (5, 6, 7, 8), replace(SAMPLED, max_new_tokens=2))])
    drain_by_sample(engine)
    assert num_kept(engine) == 0


@ENGINES
def test_samples_that_have_ended_are_freed_at_once(decoder: Decoder, name: str) -> None:
    engine = engine_of(name, decoder)
    play_turns(engine, 1)
    engine.forget([1, 2, 99])
    before = num_kept(engine)
    engine.forget([3])
    assert before > num_kept(engine) == 0


@ENGINES
def test_a_sleeping_engine_keeps_nothing(decoder: Decoder, name: str) -> None:
    engine = engine_of(name, decoder)
    play_turns(engine, 1)
    assert num_kept(engine) > 0
    assert engine.sleep() and num_kept(engine) == 0
