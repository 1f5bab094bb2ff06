# SPDX-License-Identifier: Apache-2.0
"""The single-device engine: invariance, optimizer steps, skipped steps, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.algorithms.sft import SftLoss
from tandem.config.schema.optim import OptimConfig
from tandem.data.packing import in_sequence_order, pack_microbatches, plan_microbatches
from tandem.engines.checkpoint import OPTIMIZER_FILE, read_state
from tandem.engines.single import ReferenceModel, SingleDeviceEngine
from tandem.errors import UserError
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.types import LossInputs, LossOutputs
from tests.unit.engines.minibatch import LOSS, SCALE, SEQUENCES, PoisonedLoss, cut_batches

OPTIM = OptimConfig(lr=1e-3, lr_warmup_steps=2)


def _model(folder: Path) -> LanguageModel:
    return open_model(str(folder), dtype=torch.float32, device="cpu")


def _engine(folder: Path, optim: OptimConfig = OPTIM) -> SingleDeviceEngine:
    return SingleDeviceEngine(_model(folder), optim, total_training_steps=10)


def _weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def _assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def _watch_gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return a dict that always holds the gradients accumulated last."""
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.module.named_parameters():

        def keep(parameter: torch.Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()

        parameter.register_post_accumulate_grad_hook(keep)
    return gradients


def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(tiny_policy_folder: Path) -> None:
    expected = None
    for cut in ({}, {"max_sequences": 4}, {"max_sequences": 1}, {"max_tokens": 40}):
        model = _model(tiny_policy_folder)
        gradients = _watch_gradients(model)
        engine = SingleDeviceEngine(model, OPTIM, total_training_steps=10)
        report = engine.update(cut_batches(**cut), LOSS, scale=SCALE, temperature=0.9)
        if expected is None:
            expected = (report, gradients)
            continue
        assert report.metrics == pytest.approx(expected[0].metrics, abs=1e-6)
        assert report.grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-5)
        for name, gradient in expected[1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6)


def test_a_batch_may_ask_for_squared_probabilities(tiny_policy_folder: Path) -> None:
    model = _model(tiny_policy_folder)
    batches = cut_batches(max_sequences=4)
    asking = [replace(batch, with_squares=True) for batch in batches]
    frozen = ReferenceModel(model)
    for batch, plain, both in zip(
        batches, frozen.score(batches, 0.9), frozen.score(asking, 0.9), strict=True
    ):
        both_R2 = both.score_R
        assert torch.equal(both_R2[:, 0], plain.score_R)
        h_RD = model.hidden(batch)[batch.source_R].double()
        prob_RV = torch.softmax(h_RD @ model.lm_head_weight.double().T / 0.9, -1)
        torch.testing.assert_close(both_R2[:, 1], prob_RV.square().sum(-1).float())


def test_gradient_checkpointing_changes_nothing(tiny_policy_folder: Path) -> None:
    found = []
    for granularity in (None, "pointwise", "feed_forward", "full"):
        model = _model(tiny_policy_folder)
        model.set_gradient_checkpointing(granularity is not None, granularity or "full")
        gradients = _watch_gradients(model)
        engine = SingleDeviceEngine(model, OPTIM, total_training_steps=10)
        engine.update(cut_batches(max_sequences=4), LOSS, scale=SCALE, temperature=0.9)
        found.append(gradients)
    for gradients in found[1:]:
        _assert_equal(gradients, found[0])


def test_an_update_is_a_clipped_adamw_step(tiny_policy_folder: Path) -> None:
    model = _model(tiny_policy_folder)
    gradients = _watch_gradients(model)
    optim = OptimConfig(lr=1e-3, clip_grad=0.05, weight_decay=0.3, betas=(0.8, 0.9))
    expected = [torch.nn.Parameter(p.detach().clone()) for p in model.module.parameters()]
    engine = SingleDeviceEngine(model, optim, total_training_steps=10)
    reference = torch.optim.AdamW(expected, lr=1e-3, weight_decay=0.3, betas=(0.8, 0.9))
    for _ in range(3):
        report = engine.update(cut_batches(), LOSS, scale=SCALE, temperature=1.0)
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-5) and report.grad_norm > 0.05
        for parameter, name in zip(expected, _weights(model), strict=True):
            parameter.grad = gradients[name] * 0.05 / (norm + 1e-6)
        reference.step()
        for actual, wanted in zip(model.module.parameters(), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-6)
        assert all(parameter.grad is None for parameter in model.module.parameters())


def test_the_rate_follows_the_schedule_and_not_the_updates(tiny_policy_folder: Path) -> None:
    model = _model(tiny_policy_folder)
    engine = SingleDeviceEngine(model, OPTIM, total_training_steps=10)
    before, rates = _weights(model), []
    for step in range(4):
        rates += [
            engine.update(cut_batches(), LOSS, scale=SCALE, temperature=1.0).learning_rate
            for _ in range(2)
        ]
        if step == 0:
            _assert_equal(_weights(model), before)
        engine.advance_schedule()
    assert rates == pytest.approx([0, 0, 5e-4, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_not_taken(tiny_policy_folder: Path, value: float) -> None:
    model, twin = _model(tiny_policy_folder), _model(tiny_policy_folder)
    optim = OptimConfig(lr=1e-3)
    engine = SingleDeviceEngine(model, optim, total_training_steps=10)
    undisturbed = SingleDeviceEngine(twin, optim, total_training_steps=10)
    batches = cut_batches(max_sequences=4)
    poison = PoisonedLoss(value, num_tokens=len(batches[-1].target_R))
    before = _weights(model)
    report = engine.update(batches, poison, scale=SCALE, temperature=1.0)
    assert report.skipped
    _assert_equal(_weights(model), before)
    for one in (engine, undisturbed):
        assert not one.update(batches, SftLoss(), scale=SCALE, temperature=1.0).skipped
    _assert_equal(_weights(model), _weights(twin))


@pytest.mark.parametrize("offload", [False, True])
def test_weights_are_kept_in_fp32_and_computed_with_in_half(
    tiny_policy_folder: Path, offload: bool
) -> None:
    """Check that steps too small for bf16 add up, and that the copy is rounded in place."""
    model = _model(tiny_policy_folder)
    compute = model.in_dtype(torch.bfloat16)
    shared = dict(compute.module.named_parameters())
    engine = SingleDeviceEngine(
        model,
        OptimConfig(lr=1e-5, weight_decay=0.0),
        total_training_steps=10,
        compute=compute,
        offload_optimizer=offload,
    )
    before = _weights(model)
    for _ in range(3):
        report = engine.update(cut_batches(max_sequences=4), LOSS, scale=SCALE, temperature=1.0)
        assert report.grad_norm > 0
    for name, weight in model.module.named_parameters():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, before[name])
        assert torch.equal(shared[name], weight.bfloat16())
        assert weight.grad is None and shared[name].grad is None


class HungryLoss(SftLoss):
    """Runs out of memory in the second micro-batch."""

    def __init__(self) -> None:
        object.__setattr__(self, "calls", [])

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.calls.append(inputs)
        if len(self.calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return super().__call__(inputs)


def test_running_out_of_memory_leaves_nothing_behind(tiny_policy_folder: Path) -> None:
    model, twin = _model(tiny_policy_folder), _model(tiny_policy_folder)
    engine = SingleDeviceEngine(model, OPTIM, total_training_steps=10)
    undisturbed = SingleDeviceEngine(twin, OPTIM, total_training_steps=10)
    batches = cut_batches(max_sequences=4)
    with pytest.raises(torch.OutOfMemoryError):
        engine.update(batches, HungryLoss(), scale=SCALE, temperature=1.0)
    assert all(parameter.grad is None for parameter in model.module.parameters())
    for one in (engine, undisturbed):
        one.update(batches, SftLoss(), scale=SCALE, temperature=1.0)
    _assert_equal(_weights(model), _weights(twin))


class NoRoomToStep(TorchDispatchMode):
    """Memory runs out as the optimizer steps."""

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._fused_adamw_.default:
            raise torch.OutOfMemoryError("no room")
        return func(*args, **(kwargs or {}))


def test_a_step_that_runs_out_of_memory_is_not_to_be_repeated(tiny_policy_folder: Path) -> None:
    """Check the error: smaller micro-batches would not help, and weights may be updated."""
    engine = SingleDeviceEngine(_model(tiny_policy_folder), OPTIM, total_training_steps=10)
    with NoRoomToStep(), pytest.raises(UserError, match="out of memory: the optimizer's step"):
        engine.update(cut_batches(), SftLoss(), scale=SCALE, temperature=1.0)


def test_no_micro_batch_means_a_zero_gradient(tiny_policy_folder: Path) -> None:
    model = _model(tiny_policy_folder)
    engine = SingleDeviceEngine(model, OptimConfig(lr=1e-3), total_training_steps=10)
    engine.update(cut_batches(), LOSS, scale=SCALE, temperature=1.0)
    before = _weights(model)
    report = engine.update([], LOSS, scale=SCALE, temperature=1.0)
    assert (report.metrics, report.grad_norm, report.skipped) == ({}, 0.0, False)
    moved = [not torch.equal(p, before[name]) for name, p in model.module.named_parameters()]
    assert all(moved)  # by the moments of the step before


def test_supervised_learning_lowers_the_loss(tiny_policy_folder: Path) -> None:
    for optimizer in ("AdamW", "Muon"):
        optim = OptimConfig(optimizer=optimizer, lr=1e-2, muon_lr=0.02)
        engine = _engine(tiny_policy_folder, optim)
        losses = [
            engine.update(cut_batches(), SftLoss(), scale=SCALE, temperature=1.0).metrics[
                "train/loss"
            ]
            for _ in range(12)
        ]
        assert losses[-1] < 0.8 * losses[0]


def test_log_probs_are_those_of_the_full_softmax(tiny_policy_folder: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_policy_folder)
    plan = plan_microbatches(SEQUENCES, max_sequences=4)
    batches = pack_microbatches(SEQUENCES, plan)
    expected: list[torch.Tensor] = []
    for sequence in SEQUENCES:
        ids = torch.tensor(sequence.prompt_ids + sequence.response_ids)
        with torch.no_grad():
            logits = theirs(input_ids=ids[None]).logits[0, len(sequence.prompt_ids) - 1 : -1]
        target = ids[len(sequence.prompt_ids) :, None]
        expected.append(torch.log_softmax(logits / 0.7, -1).gather(1, target)[:, 0])
    reference = ReferenceModel(_model(tiny_policy_folder))
    for scorer in (_engine(tiny_policy_folder), reference):
        parts = [scores.score_R for scores in scorer.score(batches, 0.7)]
        assert all(part.dtype == torch.float32 and not part.requires_grad for part in parts)
        actual = in_sequence_order(parts, sequences=SEQUENCES, plan=plan)
        torch.testing.assert_close(actual, torch.cat(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("AdamW", "auto"), ("AdamW", "bfloat16"), ("Adam", "auto"), ("Muon", "bfloat16")],
)
def test_a_restored_engine_continues_bit_by_bit(
    tiny_policy_folder: Path, tmp_path: Path, optimizer: str, moments: str
) -> None:
    optim = OptimConfig(
        optimizer=optimizer,
        moments_dtype=moments,
        lr=1e-3,
        lr_scheduler_type="cosine",
        lr_warmup_steps=2,
        min_lr_ratio=0.1,
    )

    def step(engine: SingleDeviceEngine) -> None:
        engine.update(cut_batches(max_sequences=6), LOSS, scale=SCALE, temperature=1.0)
        engine.advance_schedule()

    first, second = _model(tiny_policy_folder), _model(tiny_policy_folder)
    engine = SingleDeviceEngine(first, optim, total_training_steps=10)
    for _ in range(4):
        step(engine)
    engine.save(tmp_path)
    restored = SingleDeviceEngine(second, optim, total_training_steps=10)
    step(restored)
    pointers = [parameter.data_ptr() for parameter in second.module.parameters()]
    restored.load(tmp_path)
    _assert_equal(_weights(second), _weights(first))
    assert [parameter.data_ptr() for parameter in second.module.parameters()] == pointers
    for _ in range(3):
        step(engine)
        step(restored)
    _assert_equal(_weights(second), _weights(first))


def test_a_checkpoint_is_a_model_folder(tiny_policy_folder: Path, tmp_path: Path) -> None:
    model = _model(tiny_policy_folder)
    engine = SingleDeviceEngine(model, OptimConfig(lr=1e-2), total_training_steps=10)
    engine.update(cut_batches(), LOSS, scale=SCALE, temperature=1.0)
    engine.save(tmp_path)
    _assert_equal(_weights(_model(tmp_path)), _weights(model))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id is not None
    assert (tmp_path / OPTIMIZER_FILE).exists()


@pytest.mark.parametrize(
    "content",
    [
        [1],
        {},
        {"optimizer": {}, "schedule_step": 1},
        {"model": "m", "optimizer": [], "schedule_step": 1},
        {"model": "m", "optimizer": {}, "schedule_step": "1"},
    ],
)
def test_an_optimizer_file_of_other_content_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / OPTIMIZER_FILE)
    with pytest.raises(UserError, match=f"{OPTIMIZER_FILE} is not one that tandem wrote"):
        read_state(tmp_path, torch.device("cpu"), model="m")


class Hostile:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_an_optimizer_file_runs_no_code(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    content = {"model": "m", "optimizer": {}, "schedule_step": Hostile(mark)}
    torch.save(content, tmp_path / OPTIMIZER_FILE)
    with pytest.raises(UserError, match=OPTIMIZER_FILE) as refusal:
        read_state(tmp_path, torch.device("cpu"), model="m")
    assert "\n" not in str(refusal.value)
    assert not mark.exists()


def test_a_foreign_or_incomplete_checkpoint_is_refused(
    tiny_policy_folder: Path, tmp_path: Path
) -> None:
    other = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    source, saved = tmp_path / "source", tmp_path / "saved"
    saved.mkdir()
    transformers.Qwen2ForCausalLM(other).save_pretrained(source)
    _engine(source).save(saved)
    engine = _engine(tiny_policy_folder)
    with pytest.raises(UserError, match="another model"):
        engine.load(saved)
    path = saved / OPTIMIZER_FILE
    for spoil in (
        lambda: path.write_bytes(path.read_bytes()[:-100]),
        lambda: path.write_bytes(b"no archive"),
        path.unlink,
    ):
        spoil()
        with pytest.raises(UserError, match=OPTIMIZER_FILE):
            _engine(source).load(saved)


def test_a_checkpoint_of_another_optimizer_is_refused(
    tiny_policy_folder: Path, tmp_path: Path
) -> None:
    _engine(tiny_policy_folder).save(tmp_path)
    with pytest.raises(UserError, match="optim.optimizer='Muon'"):
        _engine(tiny_policy_folder, OptimConfig(optimizer="Muon")).load(tmp_path)


def test_other_families_train_and_resume_too(tmp_path: Path) -> None:
    source, saved = tmp_path / "source", tmp_path / "saved"
    saved.mkdir()
    config = transformers.GPTNeoXConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(source)
    first, second = _model(source), _model(source)
    optim = OptimConfig(optimizer="Muon", lr=1e-2, muon_lr=0.02)
    engine = SingleDeviceEngine(first, optim, total_training_steps=10)
    engine.update(cut_batches(max_sequences=6), LOSS, scale=SCALE, temperature=1.0)
    engine.save(saved)
    restored = SingleDeviceEngine(second, optim, total_training_steps=10)
    restored.load(saved)
    for one in (engine, restored):
        one.update(cut_batches(max_sequences=6), LOSS, scale=SCALE, temperature=1.0)
    _assert_equal(_weights(second), _weights(first))
