# SPDX-License-Identifier: Apache-2.0
"""Mistakes a user makes: one line with key, value and remedy, exit code 2, nothing damaged, and no
model loaded for it.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.quickstart.model import write_model
from tandem.quickstart.tokenizer import END_ID, PAD_ID
from tandem.quickstart.word_problems import WORD_PROBLEMS
from tests.fakes.commands import check_refusal, run_command
from tests.fakes.tiny_policy import TINY, write_tiny_tokenizer
from tests.fakes.tiny_run import Material, prompt_row, sft_arguments, train_arguments

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path"


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def expect_refusal(material: Material, tmp_path: Path) -> Callable[..., None]:
    """Run ``tandem train`` and ``tandem plan`` with overrides; check that both give the same error
    and that no run was begun.
    """

    def refuse(*overrides: str, says: tuple[str, ...]) -> None:
        arguments = train_arguments(material, tmp_path / "run", *overrides)
        ended = run_command(arguments, folder=tmp_path)
        check_refusal(ended, *says)
        planned = run_command(["plan", *arguments[1:]], folder=tmp_path / "plan")
        check_refusal(planned, *says)
        assert planned.errors == ended.errors
        assert not list((tmp_path / "run").glob("*"))

    return refuse


@pytest.fixture(scope="module")
def finished(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each. Copy it before writing into it."""
    folder = tmp_path_factory.mktemp("finished")
    keys = ("trainer.total_training_steps=2", "trainer.save_freq=1")
    ended = run_command(train_arguments(material, folder / "run", *keys), folder=folder)
    assert ended.code == 0, ended.stderr
    return folder / "run"


def write_rows(path: Path, *, spoilt: int, change: dict[str, object]) -> Path:
    """Eight rows, of which one is changed."""
    rows = [
        prompt_row(problem, index) for index, problem in enumerate(WORD_PROBLEMS.draw(8, seed=1))
    ]
    rows[spoilt] |= change
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_missing_data_file(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / "gsm8k/train.parquet"
    remedy = f"tandem prepare gsm8k --output {file.parent}"
    expect_refusal(f"data.train_files={file}", says=(f"data.train_files='{file}'", remedy))


def test_missing_validation_file(expect_refusal: Callable[..., None]) -> None:
    expect_refusal(
        "data.val_files=/no/such.parquet", says=("data.val_files='/no/such.parquet'", "Check")
    )


def test_empty_data_files(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    rowless, hollow = tmp_path / "rowless.parquet", tmp_path / "hollow.parquet"
    pq.write_table(
        pa.Table.from_pylist([prompt_row(WORD_PROBLEMS.draw(1, seed=1)[0], 0)])[:0], rowless
    )
    hollow.touch()
    expect_refusal(f"data.train_files={rowless}", says=(f"data.train_files='{rowless}'", "no rows"))
    expect_refusal(
        f"data.train_files={hollow}", says=(f"data.train_files='{hollow}'", "not a readable")
    )


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"prompt": []}, "has no prompt"),
        ({"prompt": [{"content": "Who speaks?"}]}, "{role, content}"),
        ({"reward_model": {"style": "rule"}}, "has no reward_model.ground_truth"),
        ({"reward_model": None}, "has no reward_model.ground_truth"),
        ({"data_source": None}, "has no data source"),
        ({"data_source": 5}, "has no data source"),
        ({"extra_info": "easy"}, "extra_info that is not a mapping"),
    ],
    ids=[
        "no prompt",
        "no role",
        "no ground truth",
        "no reward model",
        "no source",
        "number as source",
        "text as extra_info",
    ],
)
def test_row_that_lacks_something_is_named(
    change: dict[str, object], rule: str, expect_refusal: Callable[..., None], tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", spoilt=5, change=change)
    expect_refusal(
        f"data.train_files={file}",
        "~custom_reward_function.path",
        says=(f"data.train_files='{file}'", "row 5 ", rule, "Correct"),
    )


def test_unreadable_line_is_named(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", spoilt=0, change={})
    file.write_text(file.read_text() + "{broken\n")
    expect_refusal(
        f"data.train_files={file}", says=(f"data.train_files='{file}'", "line 9", "not valid")
    )


def test_source_without_a_reward(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", spoilt=2, change={"data_source": "mine/own"})
    expect_refusal(
        f"data.train_files={file}",
        "~custom_reward_function.path",
        says=("mine/own", "custom_reward_function.path"),
    )


def test_prompt_longer_than_the_limit(expect_refusal: Callable[..., None]) -> None:
    expect_refusal(
        "data.max_prompt_length=20", says=("row 0 ", "data.max_prompt_length=20", "Set data.")
    )


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train_batchsize=4", ("data.train_batchsize=4", "data.train_batch_size")),
        ("data.train_batch_size=four", ("data.train_batch_size='four'", "integer")),
        (f"{ACTOR}.optim.lr=fast", (f"{ACTOR}.optim.lr='fast'", "number")),
        ("trainer.val_only=maybe", ("trainer.val_only='maybe'", "True or False")),
        ("algorithm.adv_estimator=grp", ("algorithm.adv_estimator='grp'", "grpo", "rloo")),
        ("trainer.nnodes=", ("trainer.nnodes=''", "WORLD_SIZE", "Set trainer.nnodes=1")),
        ("trainer.nnodes=2", ("trainer.nnodes=2", "ray start --head", "MASTER_ADDR")),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", ("parallel_size=2", "Set")),
        (f"{ROLLOUT}.param_update_preduce_bucket_size_mb=0", ("preduce_bucket_size_mb=0", "Set")),
        (f"{ACTOR}.ppo_mini_batch_size=8", ("ppo_mini_batch_size=8", "train_batch_size=4", "Set")),
        (f"{ACTOR}.ppo_mini_batch_size=3", ("ppo_mini_batch_size=3", "divide", "Set")),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=50", ("ppo_max_token_len_per_gpu=50", "108", "Set")),
        ("data.train_batch_size=64", ("data.train_batch_size=64", "40", "Set")),
        ("trainer.resume_mode=resume_path", ("trainer.resume_from_path=None", "Set")),
        ("trainer.logger=[console,wandb]", ("trainer.logger='wandb'", "pip install wandb")),
        ("trainer.save_freq=True", ("trainer.save_freq=True", "number", "Set")),
        (
            "data.apply_chat_template_kwargs={add_generation_prompt:False}",
            ("data.apply_chat_template_kwargs.add_generation_prompt=False", "Remove it"),
        ),
        ("actor_rollout_ref.model.custom_chat_template=no.jinja", ("'no.jinja'", "cannot be read")),
        (
            "actor_rollout_ref.model.custom_chat_template='{% for m in messages %}'",
            ("not valid Jinja", "Correct"),
        ),
        ("trainer.logger=carrier_pigeon", ("trainer.logger='carrier_pigeon'", "console")),
    ],
)
def test_settings_that_cannot_be(
    override: str, says: tuple[str, ...], expect_refusal: Callable[..., None]
) -> None:
    expect_refusal(override, says=says)


def test_missing_model(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    missing = tmp_path / "nowhere/model"
    expect_refusal(f"{MODEL}={missing}", says=(f"{MODEL}='{missing}'", "no such folder", "Check"))
    expect_refusal(f"{MODEL}=", says=(f"{MODEL}=''", "empty"))


def test_model_without_weights(
    expect_refusal: Callable[..., None], material: Material, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(material.policy, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    expect_refusal(f"{MODEL}={folder}", says=(f"{MODEL}='{folder}'", "model.safetensors", "Use"))


def test_model_of_an_unknown_family(
    expect_refusal: Callable[..., None], material: Material, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(material.policy, folder)
    (folder / "config.json").write_text('{"model_type": "perceptron"}')
    expect_refusal(f"{MODEL}={folder}", says=(f"{MODEL}='{folder}'", "'perceptron'", "qwen2"))


def test_model_whose_weights_do_not_fit(
    expect_refusal: Callable[..., None], material: Material, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(material.policy, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    expect_refusal(f"{MODEL}={folder}", says=(f"{MODEL}='{folder}'", "shape", "Use"))


def test_model_with_the_tokenizer_of_a_larger_one(material: Material, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_tokenizer(folder)
    write_model(folder, num_tokens=50, eos_id=END_ID, pad_id=PAD_ID, seed=0, size=TINY)
    arguments = train_arguments(material, tmp_path / "run", f"{MODEL}={folder}")
    check_refusal(run_command(arguments, folder=tmp_path), f"{MODEL}='{folder}'", "only 64 tokens")
    arguments = sft_arguments(material, tmp_path / "run", f"model.partial_pretrain={folder}")
    check_refusal(run_command(arguments, folder=tmp_path), f"model.path='{folder}'", "only 64")


def test_model_without_a_tokenizer(
    expect_refusal: Callable[..., None], material: Material, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(material.policy, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    expect_refusal(f"{MODEL}={folder}", says=(f"{MODEL}='{folder}'", "tokenizer"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_package\n", ("does not import", "no_such_package", "Correct the file")),
        ("def compute_score(:\n", ("does not import", "SyntaxError", "Correct the file")),
        (
            "def other(a):\n    return 0\n",
            ("'compute_score'", "no such class or function", "other"),
        ),
        (
            "def compute_score(text):\n    return 0\n",
            ("'compute_score'", "cannot be called", "text"),
        ),
    ],
    ids=["import", "syntax", "no function", "signature"],
)
def test_custom_reward_that_does_not_load(
    text: str, says: tuple[str, ...], expect_refusal: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(text)
    keys = (f"custom_reward_function.path={file}", "custom_reward_function.name=compute_score")
    expect_refusal(*keys, says=("custom_reward_function.", *says))


def test_model_without_an_end_token(
    expect_refusal: Callable[..., None], material: Material, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(material.policy, folder, ignore=shutil.ignore_patterns("generation_config*"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    expect_refusal(f"{MODEL}={folder}", says=(f"{MODEL}='{folder}'", "end token", "ignore_eos"))


def test_custom_reward_file_that_is_not_there(expect_refusal: Callable[..., None]) -> None:
    expect_refusal(
        "custom_reward_function.path=/no/reward.py", says=("'/no/reward.py'", "no such file")
    )


def test_checkpoint_of_another_model_harms_nothing(
    finished: Path, material: Material, tmp_path: Path
) -> None:
    from tandem.quickstart.model import ModelSize
    from tests.fakes.tiny_policy import write_tiny_policy

    run = shutil.copytree(finished, tmp_path / "run")
    before = snapshot(run)
    other = write_tiny_policy(tmp_path / "other", size=ModelSize(hidden=16, intermediate=32))
    keys = (f"{MODEL}={other}", "trainer.save_freq=1")
    ended = run_command(train_arguments(material, run, *keys), folder=tmp_path / "cwd")
    check_refusal(ended, "another model", MODEL, "trainer.resume_mode=disable")
    assert snapshot(run) == before


def test_checkpoint_of_other_data_harms_nothing(
    finished: Path, material: Material, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    before = snapshot(run)
    ended = run_command(train_arguments(material, run, "data.seed=7"), folder=tmp_path / "cwd")
    check_refusal(ended, "data.seed", "trainer.resume_mode=disable")
    assert snapshot(run) == before


@pytest.mark.parametrize("name", ["pipeline.json", "actor/optimizer.pt", "actor/model.safetensors"])
def test_damaged_checkpoint_harms_nothing(
    name: str, finished: Path, material: Material, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    damaged = run / "global_step_2" / name
    damaged.write_bytes(damaged.read_bytes()[:100])
    before = snapshot(run)
    ended = run_command(train_arguments(material, run), folder=tmp_path / "cwd")
    check_refusal(ended, "global_step_2")
    assert snapshot(run) == before


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_flipped_bit_is_found_and_the_checkpoint_before_is_offered(
    name: str, finished: Path, material: Material, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    damaged = run / "global_step_2" / "actor" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    before = snapshot(run)
    whole = f"trainer.resume_from_path={run / 'global_step_1'}"
    for arguments in (
        train_arguments(material, run),
        ["plan", *train_arguments(material, run)[1:]],
        ["export", str(run), "--output", str(tmp_path / "exported")],
    ):
        ended = run_command(arguments, folder=tmp_path / "cwd")
        offer = str(run / "global_step_1") if arguments[0] == "export" else whole
        check_refusal(ended, f"actor/{name} has other contents", offer)
    assert snapshot(run) == before
    checked = run_command(["doctor", str(run)], folder=tmp_path / "cwd")
    assert checked.code == 2
    assert f"NO  global_step_2      actor/{name}" in checked.stdout
    assert "ok  global_step_1      whole" in checked.stdout


def test_tracker_that_names_no_checkpoint(
    finished: Path, material: Material, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "global_step_2")
    before = snapshot(run)
    ended = run_command(train_arguments(material, run), folder=tmp_path / "cwd")
    check_refusal(ended, "latest_checkpointed_iteration.txt", "step 2", "Write another step")
    assert snapshot(run) == before


def test_checkpoint_that_is_not_there(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "global_step_7"
    keys = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    expect_refusal(*keys, says=(f"trainer.resume_from_path='{path}'", "not a checkpoint", "Name"))


def test_run_folder_that_cannot_be_written(material: Material, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = tmp_path / "file/run"
    ended = run_command(train_arguments(material, run), folder=tmp_path)
    check_refusal(ended, f"trainer.default_local_dir='{run}'")


@pytest.mark.parametrize(
    ("shell", "ends"),
    [
        ("ulimit -n 16; {}", (1, "error: Too many open files (ulimit -n sets how many)")),
        ("{} >/dev/full", (0, "")),
    ],
    ids=["16 descriptors", "full output"],
)
def test_a_run_with_few_descriptors_or_a_full_output(
    shell: str, ends: tuple[int, str], material: Material, tmp_path: Path
) -> None:
    """The first is one line; a progress line that cannot be printed ends no run (finding 2)."""
    keys = ("trainer.total_training_steps=1", "data.val_files=[]", "trainer.device=cpu")
    words = [sys.executable, "-m", "tandem", *train_arguments(material, tmp_path / "run", *keys)]
    command = shell.format(shlex.join(words))
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    code, line = ends
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not line or ended.stderr.splitlines()[-1] == line


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("data.train_files=/no/rows.parquet",), ("data.train_files='/no/rows.parquet'",)),
        (("data.prompt_key=riddle",), ("row 0 ", "'riddle'")),
        (("data.max_length=30",), ("row 0 ", "data.max_length=30", "data.truncation")),
        (("model.partial_pretrain=/no/model",), (" model.path='/no/model'", "Check")),
        (("optim.rl=1",), ("optim.rl=1", "optim.lr")),
        (("data.train_batch_size=0",), ("data.train_batch_size=0", "at least 1")),
    ],
    ids=["file", "column", "length", "model", "key", "batch"],
)
def test_sft_refuses_in_the_same_way(
    overrides: tuple[str, ...], says: tuple[str, ...], material: Material, tmp_path: Path
) -> None:
    ended = run_command(sft_arguments(material, tmp_path / "run", *overrides), folder=tmp_path)
    check_refusal(ended, *says)
    assert not (tmp_path / "run").exists()


def test_export_and_report_of_nothing(tmp_path: Path, finished: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    ended = run_command(["export", nowhere, "--output", "model"], folder=tmp_path)
    check_refusal(ended, f"RUN='{nowhere}'", "no such folder")
    check_refusal(run_command(["report", nowhere], folder=tmp_path), f"RUN='{nowhere}'")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    ended = run_command(["export", str(finished), "--output", "full"], folder=tmp_path)
    check_refusal(ended, "--output='full'", "empty")
    (tmp_path / "file").touch()
    ended = run_command(["export", str(finished), "--output", "file"], folder=tmp_path)
    check_refusal(ended, "--output='file'", "empty folder")
    ended = run_command(["export", str(finished), "--step", "7", "--output", "x"], folder=tmp_path)
    check_refusal(ended, "--step=7", "It has: global_step_1, global_step_2.")


def test_validating_nothing(expect_refusal: Callable[..., None]) -> None:
    expect_refusal(
        "trainer.val_only=True",
        "data.val_files=[]",
        says=("data.val_files=[]", "trainer.val_only=True"),
    )


def test_quickstart_refuses_before_it_trains_anything(tmp_path: Path) -> None:
    two = run_command(["quickstart", "trainer.n_gpus_per_node=2"], folder=tmp_path)
    check_refusal(two, "trainer.n_gpus_per_node=2", "in one process", "use tandem train")
    typo = run_command(["quickstart", "trainer.total_epoch=2"], folder=tmp_path)
    check_refusal(typo, "trainer.total_epoch=2: no such key", "trainer.total_epochs")
    assert not (tmp_path / "outputs").exists()
