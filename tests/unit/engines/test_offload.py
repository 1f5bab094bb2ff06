# SPDX-License-Identifier: Apache-2.0
"""Weights that are offloaded to the host's memory keep their values and train the same."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tandem.config.schema.optim import OptimConfig
from tandem.engines import offload, streaming
from tandem.engines.offload import HostMemory, OffloadedParameters
from tandem.engines.sharded_checkpoint import save_sharded
from tandem.engines.single import ReferenceModel, SingleDeviceEngine
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.platforms.page_locked import page_locked_zeros
from tandem.types import PackedBatch
from tests.unit.engines.minibatch import LOSS, SCALE, cut_batches

OPTIM = OptimConfig(lr=1e-3)


def _model(folder: Path) -> LanguageModel:
    return open_model(str(folder), dtype=torch.float32, device="cpu")


def _engine(
    folder: Path, *, offload: bool, optim: OptimConfig = OPTIM, total_training_steps: int = 10
) -> tuple[SingleDeviceEngine, LanguageModel, LanguageModel]:
    """Return an engine, the fp32 model that it keeps, and the model that it computes with."""
    kept = _model(folder)
    computed = kept.in_dtype(torch.bfloat16)
    engine = SingleDeviceEngine(
        kept,
        optim,
        total_training_steps=total_training_steps,
        compute=computed,
        offload_weights=offload,
        offload_optimizer=offload,
    )
    return engine, kept, computed


def _step(engine: SingleDeviceEngine) -> None:
    report = engine.update(cut_batches(max_sequences=4), LOSS, scale=SCALE, temperature=1.0)
    assert report.grad_norm > 0 and not report.skipped


def _places(model: LanguageModel) -> list[int]:
    return [parameter.data_ptr() for parameter in model.module.parameters()]


def test_offloaded_parameters_move_and_come_back_as_they_were() -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,))]
    before = [(parameter.data_ptr(), parameter.detach().clone()) for parameter in parameters]
    offloaded = OffloadedParameters(parameters)
    hosted = [parameter.data_ptr() for parameter in parameters]
    for _ in range(2):
        assert [parameter.data_ptr() for parameter in parameters] == hosted
        for parameter, (place, values) in zip(parameters, before, strict=True):
            assert parameter.data_ptr() != place and torch.equal(parameter, values)
        with offloaded.on_device():
            for parameter, host, (_, values) in zip(parameters, hosted, before, strict=True):
                assert parameter.data_ptr() != host and torch.equal(parameter, values)
                assert parameter.requires_grad and parameter.is_leaf


def test_parameters_are_offloaded_after_an_error_too() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    offloaded = OffloadedParameters([parameter])
    host = parameter.data_ptr()
    with pytest.raises(ZeroDivisionError), offloaded.on_device():
        assert parameter.data_ptr() != host
        _ = 1 / 0
    assert parameter.data_ptr() == host


def test_changes_on_the_device_are_kept_unless_there_can_be_none() -> None:
    for frozen in (False, True):
        parameter = nn.Parameter(torch.zeros(3), requires_grad=False)
        with OffloadedParameters([parameter], frozen=frozen).on_device():
            parameter += 1
        assert bool((parameter == (0 if frozen else 1)).all())


def test_training_is_the_same_bit_by_bit_and_the_stored_weights_are_offloaded(
    tiny_policy_folder: Path,
) -> None:
    offloading, kept, computed = _engine(tiny_policy_folder, offload=True)
    staying, same, _ = _engine(tiny_policy_folder, offload=False)
    hosted, generating = _places(kept), _places(computed)
    for _ in range(3):
        _step(offloading)
        _step(staying)
        assert _places(kept) == hosted and _places(computed) == generating
    for one, other in zip(kept.module.parameters(), same.module.parameters(), strict=True):
        assert torch.equal(one, other) and one.grad is None


@pytest.mark.parametrize("changes", [{}, {"moments_dtype": "bfloat16"}, {"optimizer": "Muon"}])
def test_steps_by_parts_train_the_same(
    tiny_policy_folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    monkeypatch.setattr(streaming, "OPTIMIZER_PART_NUMBERS", 3000)
    optim = OptimConfig.model_validate({"lr": 1e-3, **changes})
    offloading, kept, computed = _engine(tiny_policy_folder, offload=True, optim=optim)
    staying, same, _ = _engine(tiny_policy_folder, offload=False, optim=optim)
    for _ in range(3):
        _step(offloading)
        _step(staying)
    for one, other in zip(kept.module.parameters(), same.module.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(kept.module.parameters(), computed.module.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)


def test_parts_are_whole_weights_in_order() -> None:
    sizes = (5, 1, 4, 20, 3, 3)
    weights = {str(i): torch.zeros(size) for i, size in enumerate(sizes)}
    parts = [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert list(streaming.parts_of(weights, limit=10)) == parts
    assert list(streaming.parts_of({}, limit=10)) == []


def test_host_memory_is_shared_by_many_tensors_without_overlap() -> None:
    given = [torch.randn(shape) for shape in ((30, 7), (), (1000,), (3, 5), (0, 4), (2000,))]
    memory = HostMemory([tensor.nbytes for tensor in given], device=torch.device("cpu"))
    taken = [memory.zeros_like(tensor) for tensor in given]
    half = memory.zeros_like(given[0], torch.bfloat16)
    assert not any(copy.count_nonzero() for copy in (*taken, half))
    for copy, tensor in zip(taken, given, strict=True):
        copy.copy_(tensor)
    half.copy_(given[0])
    assert all(map(torch.equal, taken, given))
    assert half.dtype == torch.bfloat16 and half.shape == given[0].shape
    assert len({tensor.untyped_storage().data_ptr() for tensor in taken}) == 1
    whole = taken[0].untyped_storage().nbytes()  # a file of them is no larger
    assert whole <= sum(tensor.nbytes + 256 for tensor in given)


def test_memory_is_allocated_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three pieces, by one thread, in the order of the tensors."""
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()
    may_go_on = threading.Event()

    def allocate(num_bytes: int, *, device_type: str) -> Tensor:
        begun.put(num_bytes)
        assert may_go_on.wait(60) and device_type == "cpu"
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(offload, "page_locked_zeros", allocate)
    monkeypatch.setattr(offload, "_LARGEST_PIECE", 512)
    memory = HostMemory([512, 1000, 256, 256], device=torch.device("cpu"))
    assert begun.get(timeout=60) == 512 and begun.empty()
    may_go_on.set()
    sizes = [512, 1000, 256, 256]
    taken = [memory.zeros_like(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    assert [begun.get(timeout=60) for _ in range(2)] == [1024, 512] and begun.empty()
    assert [len(tensor) for tensor in taken] == sizes
    assert taken[2].untyped_storage().data_ptr() == taken[3].untyped_storage().data_ptr()


def test_memory_that_is_refused_is_an_error_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other piece is asked for after the first refusal."""
    asked: list[int] = []

    def refuse(num_bytes: int, *, device_type: str) -> Tensor:
        asked.append(num_bytes)
        raise RuntimeError(f"no {num_bytes} bytes for {device_type}")

    monkeypatch.setattr(offload, "page_locked_zeros", refuse)
    monkeypatch.setattr(offload, "_LARGEST_PIECE", 512)
    memory = HostMemory([512, 512, 512], device=torch.device("cpu"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no 512 bytes for cpu"):
            memory.zeros_like(torch.empty(512, dtype=torch.uint8))
    assert asked == [512]


def test_a_thread_that_ends_by_a_mistake_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.SimpleQueue[type[BaseException]] = queue.SimpleQueue()

    def mistake(num_bytes: int, *, device_type: str) -> Tensor:
        raise KeyError(num_bytes, device_type)

    monkeypatch.setattr(threading, "excepthook", lambda ended: told.put(ended.exc_type))
    monkeypatch.setattr(offload, "page_locked_zeros", mistake)
    memory = HostMemory([512], device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="has ended"):
        memory.zeros_like(torch.empty(512, dtype=torch.uint8))
    assert told.get(timeout=60) is KeyError, "the mistake is told"


def test_the_end_of_a_process_waits_for_one_piece_only() -> None:
    """An interpreter that ends while torch allocates in a thread of its own would be aborted."""
    program = (
        "import sys, torch\n"
        "from tandem.engines import offload\n"
        "offload._LARGEST_PIECE = 1 << 27\n"
        "memory = offload.HostMemory([1 << 27] * 40, device=torch.device('cpu'))\n"
        "sys.exit(2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert b"terminate" not in ended.stderr


def test_no_more_memory_is_allocated_once_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Semaphore(0), threading.Event()
    sizes: list[int] = []

    def allocate(num_bytes: int, *, device_type: str) -> Tensor:
        sizes.append(num_bytes)
        begun.release()
        assert may_go_on.wait(60)
        return page_locked_zeros(num_bytes, device_type=device_type)

    monkeypatch.setattr(offload, "page_locked_zeros", allocate)
    monkeypatch.setattr(offload, "_LARGEST_PIECE", 512)
    before = set(threading.enumerate())
    memory = HostMemory([512] * 4, device=torch.device("cpu"))
    assert begun.acquire(timeout=60)
    (thread,) = (one for one in threading.enumerate() if one not in before)
    del memory
    may_go_on.set()
    thread.join(60)
    assert not thread.is_alive() and sizes == [512]


@pytest.mark.parametrize("total_training_steps", [0, 5])
def test_moments_get_their_memory_before_the_first_step(
    tiny_policy_folder: Path, monkeypatch: pytest.MonkeyPatch, total_training_steps: int
) -> None:
    """And the step takes this memory. A run without steps has none."""
    allocations: queue.SimpleQueue[int] = queue.SimpleQueue()

    def allocate(num_bytes: int, *, device_type: str) -> Tensor:
        allocations.put(num_bytes)
        return page_locked_zeros(num_bytes, device_type=device_type)

    monkeypatch.setattr(offload, "page_locked_zeros", allocate)
    engine, kept, _ = _engine(
        tiny_policy_folder, offload=True, total_training_steps=total_training_steps
    )
    weights = allocations.get(timeout=60)
    assert weights >= sum(parameter.nbytes for parameter in kept.module.parameters())
    if total_training_steps:
        assert allocations.get(timeout=60) == 2 * weights
        _step(engine)
    assert allocations.empty()


def test_checkpoints_are_taken_and_read_offloaded(tiny_policy_folder: Path, tmp_path: Path) -> None:
    first, kept, _ = _engine(tiny_policy_folder, offload=True)
    _step(first)
    first.save(tmp_path)
    second, read, computed = _engine(tiny_policy_folder, offload=True)
    places = _places(read)
    second.load(tmp_path)
    assert _places(read) == places
    for one, other in zip(read.module.parameters(), computed.module.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)
    _step(first)
    _step(second)
    for one, other in zip(kept.module.parameters(), read.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_moments_are_read_to_where_they_rest(tiny_policy_folder: Path, tmp_path: Path) -> None:
    """On a device there may be no room for all of them, not even for a moment."""
    first, _, _ = _engine(tiny_policy_folder, offload=True)
    _step(first)
    save_sharded(
        tmp_path,
        first._weights,
        optimizer=first._optimizer,
        regions=first._shard_map.regions,
        model=first._fingerprint(),
        schedule_step=0,
    )
    second, _, _ = _engine(tiny_policy_folder, offload=True)
    created: list[object] = []
    adam, streamed = second._optimizer.alone, second._streamed
    assert adam is not None and streamed is not None
    adam.zero_moments = lambda weights: created.append(weights) or {}
    second.load(tmp_path)
    assert adam.moments is streamed._hosted and not created
    pieces = {part.untyped_storage().data_ptr() for part in adam.moments["exp_avg"]}
    assert len(pieces) == 1
    _step(second)
    assert adam.moments is streamed._hosted


def _log_probs(reference: ReferenceModel, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    return [scores.score_R for scores in reference.score(batches, 1.0)]


def test_a_reference_is_offloaded_between_scores(tiny_policy_folder: Path) -> None:
    model, batches = _model(tiny_policy_folder), cut_batches(max_sequences=6)
    expected = _log_probs(ReferenceModel(_model(tiny_policy_folder)), batches)
    on_device = _places(model)
    reference = ReferenceModel(model, offload_weights=True)
    places = _places(model)
    assert not set(places) & set(on_device)
    for _ in range(2):
        assert all(map(torch.equal, _log_probs(reference, batches), expected))
        assert _places(model) == places
