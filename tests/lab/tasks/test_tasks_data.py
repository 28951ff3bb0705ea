"""Problems in files and on the hub: what is read, how it is split, and what is said about data that cannot be used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from troll.errors import InputError
from troll.lab.tasks import load_task
from troll.lab.tasks.records import read

ROWS = [{"prompt": f"say {n}", "answer": str(n)} for n in range(20)]
EXACT = ["troll.lab.tasks:exact_match"]


@pytest.fixture
def file(tmp_path):
    def file(content, name="my.jsonl") -> str:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif name.lower().endswith(".jsonl"):
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        elif name.endswith(".json"):
            path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        elif name.endswith(".csv"):
            path.write_text("prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in content))
        else:
            pq.write_table(pa.Table.from_pylist(content), path)
        return str(path)

    return file


@pytest.mark.parametrize("name", ["my.jsonl", "my.json", "my.csv", "my.parquet", "MY.JSONL"])
def test_every_kind_of_file_has_the_same_problems(file, name):
    task = load_task("data", data=file(ROWS, name), reward=EXACT)
    assert len(task.held_out) == 2
    everything = task.train.to_list() + task.held_out.to_list()
    assert sorted(everything, key=lambda row: int(row["answer"])) == ROWS


def test_a_file_of_json_lines_under_the_name_json(file):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    assert [record.row for record in read(file(lines, "my.json"))] == ROWS


def test_odd_but_right_files(file):
    text = (
        "\ufeff"
        + json.dumps({"prompt": "a\u2028b ü", "answer": "1"}, ensure_ascii=False)
        + "\r\n\n  \n"
        + json.dumps(ROWS[0])
    )
    records = read(file(text.encode()))
    assert [record.row["prompt"] for record in records] == ["a\u2028b ü", "say 0"]
    assert records[1].place.endswith("my.jsonl, line 4")
    [record] = read(file('prompt,answer\n"a, ""b""\nc",1\n', "my.csv"))
    assert record.row == {"prompt": 'a, "b"\nc', "answer": "1"}


def test_chat_prompts_and_further_columns_are_kept(file):
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "style": n, "difficulty": n / 2} for n in range(4)]
    task = load_task("data", data=file(rows), reward=EXACT, held_out_size=1)
    kept = task.train.to_list() + task.held_out.to_list()
    assert sorted(kept, key=lambda row: row["style"]) == rows


def test_the_held_out_problems_depend_on_neither_seed_nor_order(file):
    one = load_task("data", data=file(ROWS), reward=EXACT, held_out_size=5, train_size=6, seed=0)
    two = load_task("data", data=file(ROWS[::-1]), reward=EXACT, held_out_size=5, train_size=6, seed=1)
    assert one.held_out.to_list() == two.held_out.to_list()
    assert one.train.to_list() != two.train.to_list()
    assert len(one.train) == 6


def test_no_problem_is_on_both_sides(file):
    task = load_task("data", data=file(ROWS * 3), reward=EXACT, held_out_size=5)
    assert len(task.held_out) == 5
    assert len(set(task.held_out["prompt"])) == 5
    assert len(task.train) == 45
    assert not set(task.train["prompt"]) & set(task.held_out["prompt"])
    other = file(ROWS[:3], "test.jsonl")
    task = load_task("data", data=file(ROWS), eval_data=other, reward=EXACT)
    assert task.held_out.to_list() == ROWS[:3]
    assert task.train.to_list() == ROWS[3:]


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        ('{"prompt": "a"}\n\n{"prompt": "b"\n', "my.jsonl", "my.jsonl, line 3: Expecting ',' delimiter"),
        ('{"prompt": "a"}\n[1]\n', "my.jsonl", "my.jsonl, line 2: a list; expected: an object with named fields"),
        (
            '{"prompt": "a"}\n{"question": "b"}\n',
            "my.jsonl",
            "my.jsonl, line 2: question; expected: the field 'prompt'",
        ),
        (
            '{"prompt": "a"}\n{"prompt": 3}\n',
            "my.jsonl",
            "line 2: prompt=3; expected: the field 'prompt', text or a list",
        ),
        ('{"prompt": "a"}\n{"prompt": null}\n', "my.jsonl", "line 2: prompt=None"),
        ('{"prompt": "a"}\n{"prompt": "  "}\n', "my.jsonl", "line 2: prompt is empty"),
        (
            '{"prompt": ["a"]}\n',
            "my.jsonl",
            "line 1: prompt has 'a'; expected: text, or messages with role and content",
        ),
        ("", "my.jsonl", "my.jsonl, which is empty"),
        ("[]", "my.json", "my.json, which is empty"),
        ("[\n{}\n,]", "my.json", "my.json, line 3: "),
        ('{"prompt": "a"}', "my.json", "my.json: a dict; expected: a list of objects"),
        ('[{"prompt": "a"}, 7]', "my.json", "my.json, record 2: a int"),
        ("prompt,answer\na,1\nb\n", "my.csv", "my.csv, line 3, which has another number of fields"),
        ("prompt,answer\na,1,2\n", "my.csv", "my.csv, line 2, which has another number of fields"),
        ('prompt,answer\na,"1\n', "my.csv", "my.csv, line 2: unexpected end of data"),
        (b"\xff\xfe\x00", "my.jsonl", "my.jsonl, which cannot be read .*expected: UTF-8 text"),
        (b"PAR1 not", "my.parquet", "my.parquet, which cannot be read .*expected: a parquet file"),
        ("prompt", "my.txt", "my.txt; expected: a file that ends in .jsonl, .json, .parquet, .csv"),
        (ROWS[:1], "my.jsonl", "held_out_size=1; .*my.jsonl has 1 different problems"),
        (
            [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "y"}, {"prompt": "c", "x": 2}],
            "my.jsonl",
            "one type in each column",
        ),
    ],
)
def test_data_that_cannot_be_used_is_said(file, content, name, says):
    with pytest.raises(InputError, match=says):
        load_task("data", data=file(content, name), reward=EXACT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"held_out_size": 20}, "held_out_size=20; .* has 20 different problems; .*try: held_out_size=2"),
        ({"held_out_size": 5, "train_size": 16}, "train_size=16; .*my.jsonl has 15 problems; .*try: train_size=15"),
        ({"reward": []}, "without a reward; .*try: --reward"),
        ({"data": None}, "without data; .*try: --data"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl, which does not exist"),
        ({"data": "../nowhere"}, "'../nowhere', which does not exist; expected: a file, or owner/name on the hub"),
        ({"data": "a/b/c"}, "'a/b/c', which does not exist"),
        ({"options": {"digits": 1}}, "the option digits=1 of data; expected: skip_incomplete=False"),
    ],
)
def test_requests_that_cannot_be_met_are_said(file, arguments, says):
    with pytest.raises(InputError, match=says):
        load_task("data", **{"data": file(ROWS), "reward": EXACT, **arguments})


def test_incomplete_records_are_left_out_where_asked(file):
    path = file([*ROWS, {"prompt": ""}, {"answer": "1"}])
    with pytest.raises(InputError, match=r"line 21: prompt is empty; .*skip_incomplete=true"):
        load_task("data", data=path, reward=EXACT)
    task = load_task("data", data=path, reward=EXACT, options={"skip_incomplete": "true"})
    assert len(task.train) + len(task.held_out) == 20
    with pytest.raises(InputError, match="line 1: prompt is empty"):
        load_task("data", data=file([{"prompt": ""}]), reward=EXACT, options={"skip_incomplete": True})


SENTENCE = "the data set 'openai/gsm8k' of the hub, which cannot be loaded .*try: .*--data FILE.jsonl$"


def test_offline_the_hub_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=SENTENCE):
        load_task("gsm8k")


def test_without_a_network_the_hub_is_one_sentence_at_once(tmp_path):
    program = "import troll, troll.lab.tasks as t\ntry: t.load_task('gsm8k')\nexcept troll.InputError as e: print(e)"
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert re.search(SENTENCE, done.stdout.strip())
    assert done.stdout.count("\n") == 1
    assert "Retry" not in done.stderr
