"""Problems in files and on the hub: reading, the split, and the errors for unusable data."""

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
from troll.lab.tasks.data import read

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
    assert len(task.eval_dataset) == 2
    everything = task.train_dataset.to_list() + task.eval_dataset.to_list()
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
    assert records[1].origin.endswith("my.jsonl, line 4")
    [record] = read(file('prompt,answer\n"a, ""b""\nc",1\n', "my.csv"))
    assert record.row == {"prompt": 'a, "b"\nc', "answer": "1"}


def test_chat_prompts_and_further_columns_are_kept(file):
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "style": n, "difficulty": n / 2} for n in range(4)]
    task = load_task("data", data=file(rows), reward=EXACT, eval_size=1)
    kept = task.train_dataset.to_list() + task.eval_dataset.to_list()
    assert sorted(kept, key=lambda row: row["style"]) == rows


def test_the_held_out_problems_depend_on_neither_seed_nor_order(file):
    one = load_task("data", data=file(ROWS), reward=EXACT, eval_size=5, train_size=6, seed=0)
    two = load_task("data", data=file(ROWS[::-1]), reward=EXACT, eval_size=5, train_size=6, seed=1)
    assert one.eval_dataset.to_list() == two.eval_dataset.to_list()
    assert one.train_dataset.to_list() != two.train_dataset.to_list()
    assert len(one.train_dataset) == 6


def test_no_problem_is_on_both_sides(file):
    task = load_task("data", data=file(ROWS * 3), reward=EXACT, eval_size=5)
    assert len(task.eval_dataset) == 5
    assert len(set(task.eval_dataset["prompt"])) == 5
    assert len(task.train_dataset) == 45
    assert not set(task.train_dataset["prompt"]) & set(task.eval_dataset["prompt"])
    other = file(ROWS[:3], "test.jsonl")
    task = load_task("data", data=file(ROWS), eval_data=other, reward=EXACT)
    assert task.eval_dataset.to_list() == ROWS[:3]
    assert task.train_dataset.to_list() == ROWS[3:]


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        ('{"prompt": "a"}\n\n{"prompt": "b"\n', "my.jsonl", "my.jsonl, line 3: invalid JSON: Expecting ',' delimiter"),
        ('{"prompt": "a"}\n[1]\n', "my.jsonl", "my.jsonl, line 2: expected an object with fields, got a list"),
        (
            '{"prompt": "a"}\n{"question": "b"}\n',
            "my.jsonl",
            "line 2 has no field 'prompt'; its fields are: question. Rename .* to 'prompt', or leave out 1 of 2",
        ),
        (
            '{"prompt": "a"}\n{"prompt": 3}\n',
            "my.jsonl",
            "line 2: prompt must be text or a list, got 3",
        ),
        ('{"prompt": "a"}\n{"prompt": null}\n', "my.jsonl", "line 2: prompt must be text or a list, got None"),
        ('{"prompt": "a"}\n{"prompt": "  "}\n', "my.jsonl", "line 2: prompt is empty"),
        (
            '{"prompt": ["a"]}\n',
            "my.jsonl",
            "line 1: the prompt contains 'a', which is not a chat message",
        ),
        ("", "my.jsonl", "my.jsonl is empty"),
        ("[]", "my.json", "my.json is empty"),
        ("[\n{}\n,]", "my.json", "my.json, line 3: "),
        ('{"prompt": "a"}', "my.json", "my.json: expected a list of objects, got a dict"),
        ('[{"prompt": "a"}, 7]', "my.json", "my.json, record 2: expected an object with fields, got a int"),
        ("prompt,answer\na,1\nb\n", "my.csv", "my.csv, line 3 does not have 2 fields like the header"),
        ("prompt,answer\na,1,2\n", "my.csv", "my.csv, line 2 does not have 2 fields like the header"),
        ('prompt,answer\na,"1\n', "my.csv", "my.csv, line 2: invalid CSV: unexpected end of data"),
        (b"\xff\xfe\x00", "my.jsonl", "Cannot read .*my.jsonl as text: .* Convert the file to UTF-8"),
        (b"PAR1 not", "my.parquet", "Cannot read .*my.parquet as parquet"),
        ("prompt", "my.txt", "my.txt: its name ends in none of .jsonl, .json, .parquet, .csv"),
        (ROWS[:1], "my.jsonl", "eval_size=1 leaves nothing to train on: .*my.jsonl has 1 different problems"),
        (
            [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "y"}, {"prompt": "c", "x": 2}],
            "my.jsonl",
            "a column has values of different types .* Use one type in each column",
        ),
    ],
)
def test_data_that_cannot_be_used_is_said(file, content, name, says):
    with pytest.raises(InputError, match=says):
        load_task("data", data=file(content, name), reward=EXACT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"eval_size": 20}, "eval_size=20 leaves nothing .* has 20 different problems. Use eval_size=2"),
        ({"eval_size": 5, "train_size": 16}, "train_size=16, but .*my.jsonl has only 15 problems. Use train_size=15"),
        ({"reward": []}, "needs a reward function. Pass --reward"),
        ({"data": None}, "--task data needs --data"),
        ({"data": "nowhere.jsonl"}, "The file nowhere.jsonl does not exist"),
        (
            {"data": "../nowhere"},
            "The file ../nowhere does not exist. Pass a file, or a dataset on the hub as owner/name",
        ),
        ({"data": "a/b/c"}, "The file a/b/c does not exist"),
        ({"options": {"digits": 1}}, "The task data has no option 'digits'. The options are skip_incomplete=False"),
    ],
)
def test_requests_that_cannot_be_met_are_said(file, arguments, says):
    with pytest.raises(InputError, match=says):
        load_task("data", **{"data": file(ROWS), "reward": EXACT, **arguments})


def test_incomplete_records_are_left_out_where_asked(file):
    path = file([*ROWS, {"prompt": ""}, {"answer": "1"}])
    with pytest.raises(
        InputError, match=r"line 21: prompt is empty. .* or leave out 2 of 22 records with .*skip_incomplete=true"
    ):
        load_task("data", data=path, reward=EXACT)
    task = load_task("data", data=path, reward=EXACT, options={"skip_incomplete": "true"})
    assert len(task.train_dataset) + len(task.eval_dataset) == 20
    with pytest.raises(InputError, match="line 1: prompt is empty"):
        load_task("data", data=file([{"prompt": ""}]), reward=EXACT, options={"skip_incomplete": True})


SENTENCE = "Cannot load the dataset 'openai/gsm8k' from the hub: .* or pass a local file: --data FILE.jsonl.$"


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
