# SPDX-License-Identifier: Apache-2.0
"""The report: complete, self-contained, bounded, and deaf to markup in what models write."""

import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from tandem.cli.report import run as run_command
from tandem.errors import UserError
from tandem.metrics.jsonl import BEFORE_FIRST_STEP, JsonLinesFile
from tandem.report.headline import tiles
from tandem.report.report import write_report
from tandem.report.run_folder import read_run

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028\ud800 \"'`${1}{{ 7 * 7 }}"
)


class _Page(HTMLParser):
    """Counts elements and keeps what is needed to judge a page."""

    def __init__(self, text):
        super().__init__()
        self.elements = Counter()
        self.addresses = []
        self.scripts = []
        self.visible = []
        self._stack = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements[tag] += 1
        self._stack.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag):
        while tag in self._stack and self._stack.pop() != tag:
            pass

    def handle_data(self, data):
        inside = self._stack[-1] if self._stack else ""
        (self.scripts if inside == "script" else self.visible).append(data)

    @property
    def data(self):
        return json.loads(self.scripts[0])


def _append(path, records):
    file = JsonLinesFile(path, keep_through_step=BEFORE_FIRST_STEP)
    for record in records:
        file.append(record)
    file.close()


def _metrics(folder, num_steps, **more):
    validation = {"val-core/gsm8k/reward/mean@1": 0.25}
    steps = [
        {"step": step, "critic/score/mean": step / num_steps, "timing_s/step": 2.0, **more}
        for step in range(1, num_steps + 1)
    ]
    _append(folder / "metrics.jsonl", [{"step": 0, **validation}, *steps])


def _rollout(step, *, text="a b", num_tokens=2, **more):
    return {
        "step": step,
        "sample_id": step,
        "weights_version": 0,
        "data_source": "gsm8k",
        "prompt": text,
        "response": text,
        "ground_truth": "3",
        "score": 1.0,
        "status": "value",
        "detail": "",
        "extra": {},
        "advantage": 0.5,
        "finish_reason": "stop",
        "tokens": ["tok"] * num_tokens,
        "log_probs": [-0.25] * num_tokens,
        **more,
    }


def _page(folder):
    return _Page(write_report(folder, folder / "report.html").read_text(encoding="utf-8"))


def test_the_report_shows_what_the_run_left(tmp_path):
    _metrics(tmp_path, 40)
    _append(tmp_path / "rollouts.jsonl", [_rollout(1), _rollout(2, score=None, status="timeout")])
    config = {"trainer": {"experiment_name": "my run"}, "data": {"train_batch_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    summary = {"accuracy_before": 0.25, "accuracy_after": 0.9375}
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    page = _page(tmp_path)

    visible = " ".join(" ".join(page.visible).split())
    for text in ("my run", "40 steps", "93.8 %", "from 25.0 %", "data.train_batch_size", "128"):
        assert text in visible
    assert page.data["curves"]["critic/score/mean"]["y"][-1] == 1.0
    assert [chart["title"] for chart in page.data["charts"]] == ["Training reward", "Validation"]
    assert [record["score"] for record in page.data["rollouts"]] == [1.0, None]
    assert page.data["rollouts"][0]["logp"] == [-0.25, -0.25]


def test_engines_that_were_started_again_are_listed(tmp_path):
    steps = [{"step": n, "rollout/engine/num_restarts": 2.0 * (n == 7)} for n in range(1, 9)]
    _append(tmp_path / "metrics.jsonl", steps)
    visible = " ".join(" ".join(_page(tmp_path).visible).split())
    assert "Engines started again" in visible
    assert "generated again. step 7 2" in visible


def test_a_conversation_is_shown_with_its_turns(tmp_path):
    _metrics(tmp_path, 2)
    spans = [
        {"role": "assistant", "drawn": True, "num_tokens": 1, "text": "a", "versions": [[0, 1]]},
        {"role": "tool", "drawn": False, "num_tokens": 1, "text": "b", "wait_s": 0.5},
    ]
    episode = {"end": "answer", "detail": "", "calls": ["ok"], "wait_s": 0.5, "forks": []}
    _append(tmp_path / "rollouts.jsonl", [_rollout(1, spans=spans, episode=episode), _rollout(2)])
    talked, single = _page(tmp_path).data["rollouts"]
    assert talked["spans"] == [
        {"role": "assistant", "drawn": True, "num_tokens": 1, "versions": [[0, 1]]},
        {"role": "tool", "drawn": False, "num_tokens": 1, "wait_s": 0.5},
    ]
    assert talked["episode"] == episode
    assert (single["spans"], single["episode"]) == ([], None)


def test_a_banner_says_that_nothing_was_learnt_and_why(tmp_path):
    idle = (
        "critic/advantages/min",
        "critic/advantages/max",
        "critic/score/min",
        "critic/score/max",
    )
    _metrics(tmp_path, 4, **dict.fromkeys(idle, 0.0), **{"response_length/clip_ratio": 1.0})
    config = {"actor_rollout_ref": {"rollout": {"n": 8}}, "data": {"max_response_length": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    visible = " ".join(" ".join(_page(tmp_path).visible).split())
    assert "Nothing was learnt from the reward in 4 steps in a row, 1 to 4: every" in visible
    assert "100 % of the responses have data.max_response_length=16 tokens" in visible


def test_the_report_needs_no_network_and_no_other_file(tmp_path):
    _metrics(tmp_path, 3)

    text = write_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")

    assert _Page(text).addresses == ["data:,"]
    assert "default-src 'none'" in text
    namespaces = re.findall(r"https?://[^\s\"']+", text)
    assert namespaces == ["http://www.w3.org/2000/svg"]


def test_hostile_text_stays_text(tmp_path):
    _metrics(tmp_path, 3, **{f"reward/{HOSTILE}/mean": 1.0})
    _append(
        tmp_path / "rollouts.jsonl",
        [_rollout(1, text=HOSTILE, tokens=[HOSTILE], extra={HOSTILE: 1.0}, ground_truth=HOSTILE)],
    )
    config = {"trainer": {"experiment_name": HOSTILE}, HOSTILE: HOSTILE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = tmp_path / "plain"
    plain.mkdir()
    _metrics(plain, 3)
    _append(plain / "rollouts.jsonl", [_rollout(1)])
    (plain / "config.json").write_text(json.dumps({"trainer": {"experiment_name": "x"}, "y": 1}))

    page = _page(tmp_path)

    assert page.elements == _page(plain).elements
    assert page.data["rollouts"][0]["prompt"] == HOSTILE
    assert page.data["rollouts"][0]["tokens"] == [HOSTILE]
    assert not any("alert(1)" in script for script in page.scripts[1:])


def test_pictures_are_shown_unless_they_are_another_address(tmp_path):
    _metrics(tmp_path, 3)
    picture = "data:image/png;base64,AAAA"
    found = [[picture, "https://example.org/x.png", 7], "data:image/png;base64,AAAA", None]
    _append(tmp_path / "rollouts.jsonl", [_rollout(1, pictures=x) for x in found])
    shown = _page(tmp_path).data["rollouts"]
    assert [record["pictures"] for record in shown] == [[picture], [], []]


def test_many_pictures_give_a_bounded_page(tmp_path):
    _metrics(tmp_path, 3)
    pictures = ["data:image/jpeg;base64," + "A" * 4000] * 4
    records = [_rollout(step, pictures=pictures) for step in range(1, 401)]
    _append(tmp_path / "rollouts.jsonl", records)
    shown = _page(tmp_path).data["rollouts"]
    assert 50 <= len(shown) < 200
    assert (tmp_path / "report.html").stat().st_size < 4e6


def test_a_long_run_gives_a_bounded_page(tmp_path):
    _metrics(tmp_path, 2000)
    _append(
        tmp_path / "rollouts.jsonl",
        [_rollout(step, num_tokens=500) for step in range(1, 501)],
    )

    page = _page(tmp_path)

    assert max(len(curve["x"]) for curve in page.data["curves"].values()) <= 400
    assert page.data["curves"]["critic/score/mean"]["x"][-1] == 2000
    shown = page.data["rollouts"]
    assert 100 <= len(shown) <= 400
    assert sum(len(record["tokens"]) for record in shown) <= 150_000
    assert shown[0]["step"] < 20 and shown[-1]["step"] > 480
    assert (tmp_path / "report.html").stat().st_size < 4e6


def test_a_very_long_rollout_is_cut(tmp_path):
    _metrics(tmp_path, 1)
    _append(tmp_path / "rollouts.jsonl", [_rollout(1, text="x" * 50_000, num_tokens=200_000)])

    (record,) = _page(tmp_path).data["rollouts"]

    assert (record["length"], len(record["tokens"])) == (200_000, 2048)
    assert len(record["response"]) < 10_000


def test_a_run_in_progress_can_be_reported(tmp_path):
    _metrics(tmp_path, 3)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (tmp_path / name).open("ab") as stream:
            stream.write(b'{"step": 4, "cri')

    assert _page(tmp_path).data["curves"]["critic/score/mean"]["x"] == [1, 2, 3]


def test_metrics_that_are_not_numbers_are_gaps(tmp_path):
    _append(
        tmp_path / "metrics.jsonl",
        [
            {"step": 1, "a": None, "b": float("nan")},
            {"step": 2, "a": 1.0, "b": 2.0},
            {"step": 3, "a": float("inf"), "b": "text"},
        ],
    )

    data = _page(tmp_path).data

    assert data["curves"]["a"] == {"x": [2], "y": [1.0]}
    assert data["curves"]["b"] == {"x": [2], "y": [2.0]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no metrics.jsonl"),
        ("", "has no metrics.jsonl"),
        ('{"step": 1, "a"', "has no metrics.jsonl"),
        ('{"a": 1}\n', "line 1 has no integer step"),
        ('x\n{"step": 1}\n', "line 1 is not a JSON object"),
    ],
)
def test_a_folder_without_a_run_is_an_error(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)

    with pytest.raises(UserError, match=message) as caught:
        write_report(tmp_path, tmp_path / "report.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_no_such_folder(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "none", tmp_path / "report.html")


def test_a_damaged_config_is_named(tmp_path):
    _metrics(tmp_path, 1)
    (tmp_path / "config.json").write_text("{")

    with pytest.raises(UserError, match="config.json: is not valid JSON"):
        write_report(tmp_path, tmp_path / "report.html")


def test_an_output_that_cannot_be_written(tmp_path):
    _metrics(tmp_path, 1)
    (tmp_path / "file").write_text("")

    with pytest.raises(UserError, match="--output=.*cannot be written"):
        write_report(tmp_path, tmp_path / "file" / "report.html")


@pytest.mark.parametrize("name", ["", "..", "/"])
def test_an_output_that_is_a_folder(tmp_path, name):
    _metrics(tmp_path, 1)

    with pytest.raises(UserError, match="--output=.*is a folder. Give the path of a file"):
        write_report(tmp_path, tmp_path / name)


def test_the_command_prints_the_path_of_the_report(tmp_path, capsys):
    _metrics(tmp_path, 2)

    assert run_command([str(tmp_path)]) == 0
    assert run_command([str(tmp_path), "--output", str(tmp_path / "other.html")]) == 0

    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "report.html"),
        str(tmp_path / "other.html"),
    ]
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "other.html").read_bytes()


@pytest.mark.parametrize(
    ("num_steps", "value", "note"),
    [(1, "1", "from 1"), (8, "1", "from 0.125"), (100, "0.955", "from 0.055, means of 10 steps")],
)
def test_the_tiles_of_short_runs_show_the_first_and_the_last_step(tmp_path, num_steps, value, note):
    _metrics(tmp_path, num_steps)
    (tile,) = (tile for tile in tiles(read_run(tmp_path)) if tile.label == "Training reward")
    assert (tile.value, tile.note) == (value, note)
