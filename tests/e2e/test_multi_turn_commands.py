# SPDX-License-Identifier: Apache-2.0
"""verl's examples for GSM8K with a tool, with a simulated user, and for search (M8, M9).

They train in a tiny form. The classes of tools have the methods that those of verl 0.5, 0.8 and 0.9
have, and the user those of verl 0.5 to 0.7.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fakes.calling_model import conversation, write_calling_model
from tests.fakes.commands import Conditions, run_command
from tests.fakes.multi_turn_commands import COMMANDS, words_of
from tests.fakes.tiny_run import metrics_of, read_lines

NAMES = {"gsm8k": "calc_gsm8k_reward", "search": "search"}
QUESTIONS = {"gsm8k": "How much is 6 times 7?", "search": "Who takes the apples?"}
ARGUMENTS: Mapping[str, Any] = {"gsm8k": {"answer": "42"}, "search": {"query_list": ["apples"]}}
RESULTS = {"gsm8k": "answer=42 reward=1.0", "search": "Mia takes 39 apples."}
ANSWERS = {"gsm8k": "#### 42", "search": "<answer>Mia</answer>"}
SOURCES = {"gsm8k": "openai/gsm8k", "search": "searchR1_nq"}
TRUTHS: Mapping[str, Any] = {"gsm8k": "42", "search": {"target": ["Mia"]}}
CREATE = {
    "0.5": """
    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths[instance_id] = ground_truth
        return instance_id
""",
    "0.8": """
    async def create(self, instance_id=None, **kwargs):
        self.truths[instance_id] = kwargs.get("create_kwargs", {}).get("ground_truth")
        return instance_id, ToolResponse()
""",
}
CREATE["0.9"] = CREATE["0.8"]
EXECUTE = {
    "0.5": "async def execute(self, instance_id, parameters, **kwargs):",
    "0.8": "async def execute(self, instance_id, parameters, **kwargs):",
    "0.9": "async def execute(self, instance_id, parameters, *, agent_data, **kwargs):",
}
CLASSES = """
import json, urllib.request
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class Tool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.truths = {{}}
{create}
    async def release(self, instance_id, **kwargs):
        del self.truths[instance_id]


class Gsm8kTool(Tool):
    {execute}
        answer = parameters["answer"]
        reward = float(answer == self.truths[instance_id])
        return {said}(f"{{answer=!s}} {{reward=}}"), reward, {{}}


class SearchTool(Tool):
    {execute}
        fields = {{"queries": parameters["query_list"], "topk": self.config["topk"]}}
        url, body = self.config["retrieval_service_url"], json.dumps(fields).encode()
        with urllib.request.urlopen(url, body, timeout=self.config["timeout"]) as answer:
            ((found, *_),) = json.load(answer)["result"]
        return {said}(found["document"]["contents"]), 0.0, {{"status": "success"}}
"""

USER = """
from uuid import uuid4

from verl.interactions.base import BaseInteraction


class Gsm8kInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        self._instance_dict[instance_id]["response"] = said[-1]
        reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "Your response is correct!", 1.0, {}
        return False, "Your response is incorrect!", 0.0, {}

    async def calculate_score(self, instance_id, **kwargs) -> float:
        known = self._instance_dict[instance_id]
        return float(known["response"].endswith("#### " + known["ground_truth"]))

    async def finalize_interaction(self, instance_id, **kwargs) -> None:
        del self._instance_dict[instance_id]
"""
WRONG = "Your response is incorrect!"
"""What the user says to a wrong answer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that calls the tool of each example by itself."""
    conversations = [
        conversation(
            QUESTIONS[task],
            NAMES[task],
            arguments=ARGUMENTS[task],
            result=RESULTS[task],
            answer=ANSWERS[task],
        )
        for task in NAMES
    ]
    turns = (QUESTIONS["gsm8k"], "#### 41", WRONG, ANSWERS["gsm8k"])
    roles = ("user", "assistant") * 2
    talk = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    conversations.append({"messages": talk})
    return write_calling_model(tmp_path_factory.mktemp("multi_turn"), conversations)


@pytest.fixture(scope="module")
def retriever() -> Iterator[str]:
    """Serve the answers of verl's retrieval server."""

    class Retriever(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
            document = {"document": {"contents": RESULTS["search"]}, "score": 1.0}
            results = [[document] * fields["topk"] for _ in fields["queries"]]
            body = json.dumps({"result": results}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Retriever) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
        server.shutdown()


def write_tool(folder: Path, task: str, *, version: str, url: str) -> Path:
    """Write the class of a tool and the YAML file that names it."""
    said = "str" if version == "0.5" else "(lambda text: ToolResponse(text=text))"
    source = CLASSES.format(create=CREATE[version], execute=EXECUTE[version], said=said)
    (folder / "own_tools.py").write_text(source)
    schemas: Mapping[str, Any] = {
        "gsm8k": {"answer": {"type": "string", "description": "The answer, digits"}},
        "search": {
            "query_list": {"type": "array", "item": {"type": "string"}, "description": "Queries"}
        },
    }
    function = {
        "name": NAMES[task],
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": schemas[task],
            "required": [*schemas[task]],
        },
    }
    served = {"retrieval_service_url": url, "num_workers": 120, "rate_limit": 120, "topk": 3}
    entry = {
        "class_name": {"gsm8k": "own_tools.Gsm8kTool", "search": "own_tools.SearchTool"}[task],
        "config": {
            **({} if version == "0.5" else {"type": "native"}),
            **({"timeout": 30, **served} if task == "search" else {}),
        },
        "tool_schema": {"type": "function", "function": function},
    }
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return folder / "tools.yaml"


def write_rows(file: Path, task: str, *, version: str, has_user: bool = False) -> Path:
    """Write two rows as verl's preprocessing does; later versions name the agent."""
    given = {NAMES[task]: {"create_kwargs": {"ground_truth": "42", "question": QUESTIONS[task]}}}
    tools = {"need_tools_kwargs": True, "tools_kwargs": given}
    user = {"query": QUESTIONS[task], "ground_truth": "42"}
    row = {
        "data_source": SOURCES[task],
        **({} if version == "0.5" else {"agent_name": "tool_agent"}),
        "prompt": [{"role": "user", "content": QUESTIONS[task]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": TRUTHS[task]},
        "extra_info": {
            "split": "train",
            "index": 0,
            **({} if has_user else tools),
            "interaction_kwargs": {**({"name": "gsm8k"} if has_user else {}), **user},
        },
    }
    pq.write_table(pa.Table.from_pylist([row] * 2), file)
    return file


def write_user(folder: Path) -> Path:
    """Write the class of a simulated user and the YAML file that names it."""
    (folder / "own_users.py").write_text(USER)
    entry = {"name": "gsm8k", "class_name": "own_users.Gsm8kInteraction", "config": {}}
    (folder / "users.yaml").write_text(json.dumps({"interaction": [entry]}))
    return folder / "users.yaml"


def train(words: Sequence[str], folder: Path, *, rows: Path, model: Path, key: str) -> Path:
    """Run verl's words with the sizes of a tiny run; return its folder.

    Args:
        key: the key of the file of tools or users.
    """
    run = folder / "run"
    sizes = (
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        f"actor_rollout_ref.rollout.multi_turn.{key}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "data.train_batch_size=2",
        "data.max_prompt_length=96",
        "data.max_response_length=160",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
    )
    ended = run_command(
        ["main_ppo", *words, *sizes],
        folder=folder,
        conditions=Conditions(environment={"PYTHONPATH": str(folder)}),
    )
    assert ended.code == 0, ended.stderr
    assert metrics_of(run)[1]["agent/failed"] == 0
    return run


def given_texts(run: Path) -> str:
    """Return what the episodes of a run were told."""
    spans = [span for row in read_lines(run / "rollouts.jsonl") for span in row["spans"]]
    return "".join(span["text"] for span in spans if not span["drawn"])


@pytest.mark.parametrize(("task", "version"), list(COMMANDS), ids=str)
def test_m8_m9_an_example_trains_with_calls(
    model: Path, retriever: str, tmp_path: Path, task: str, version: str
) -> None:
    rows = write_rows(tmp_path / "rows.parquet", task, version=version)
    tools = write_tool(tmp_path, task, version=version, url=retriever)
    words = words_of(task, version, tmp_path)
    run = train(words, tmp_path, rows=rows, model=model, key=f"tool_config_path={tools}")
    assert metrics_of(run)[1]["agent/calls/ok"] >= 1
    assert RESULTS[task] in given_texts(run)


def test_m8_m9_an_example_trains_with_a_simulated_user(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", "gsm8k", version="0.5", has_user=True)
    words = words_of("gsm8k", "0.5", tmp_path)
    key = f"interaction_config_path={write_user(tmp_path)}"
    run = train(words, tmp_path, rows=rows, model=model, key=key)
    assert metrics_of(run)[1]["num_turns/mean"] > 2, "the user has answered"
    assert WRONG in given_texts(run)
