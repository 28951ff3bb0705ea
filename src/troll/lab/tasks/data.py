"""Problems from files and from the Hugging Face hub: reading, checking fields, and the split into train and eval.

Every record keeps its origin (file and line), so that an error names the line to fix. The task ``data`` is here too.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from troll.errors import InputError
from troll.lab.hub import fail_fast
from troll.lab.tasks.task import Request, Row, Task, first_line

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
OPTIONS = {"skip_incomplete": False}
MAX_EVAL_SIZE = 200  # by default at most 200 problems, and at most a tenth of them, are held out


def load(request: Request) -> Task:
    """The task ``data``: prompts, plain or chat, and the columns that the reward functions take."""
    if request.data is None:
        raise InputError("--task data needs --data", "Pass a file or a dataset on the hub, e.g. --data prompts.jsonl")
    train, held_out = split(request, *read_problems(request, _with_prompt))
    return Task(
        name=request.name,
        description=f"prompts from {request.data}",
        train_dataset=to_dataset(train),
        eval_dataset=to_dataset(held_out),
        reward_funcs=[],  # load_task adds those of --reward
        answer_of=first_line,
    )


def _with_prompt(record: Record) -> Record:
    prompt = field(record, "prompt", (str, list))
    for message in prompt if isinstance(prompt, list) else ():
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise InputError(
                f"{record.origin}: the prompt contains {message!r:.80}, which is not a chat message",
                'A message is {"role": …, "content": …}',
            )
    return record


@dataclass(frozen=True)
class Record:
    """One problem and its origin: file and line, or dataset and number."""

    row: Row
    origin: str


class DataSource(NamedTuple):
    """A file, or a dataset on the hub with its split and subset."""

    name: str
    split: str = "train"
    subset: str | None = None


def read_problems(
    request: Request,
    parse: Callable[[Record], Record],
    default: tuple[DataSource, DataSource | None] | None = None,
    options: Mapping[str, Any] = OPTIONS,
) -> tuple[list[Record], list[Record] | None]:
    """The training problems and, if they come from a separate source, the held-out problems.

    Args:
        request: ``data`` and ``eval_data`` override the default sources.
        parse: converts a raw record to a problem with a prompt, or raises ``InputError``.
        default: the sources for training and evaluation if the request names none.
        options: the options of the task with their defaults.
    """
    skip = request.choose(options)["skip_incomplete"]
    train, held_out = default or (DataSource(""), None)
    if request.data is not None and request.data != train.name:
        train, held_out = DataSource(request.data), None
    if request.eval_data is not None and (held_out is None or request.eval_data != held_out.name):
        held_out = DataSource(request.eval_data, "test")
    return (
        _parse_all(read(*train), parse, skip),
        None if held_out is None else _parse_all(read(*held_out), parse, skip),
    )


def _parse_all(records: list[Record], parse: Callable[[Record], Record], skip: bool) -> list[Record]:
    """The parsed records. An incomplete one raises, or is left out if ``skip`` is set and others are complete."""
    complete, errors = [], []
    for record in records:
        try:
            complete.append(parse(record))
        except InputError as error:
            errors.append(error)
    if errors and not complete:
        raise errors[0]
    if errors and not skip:
        leave_out = f"leave out {len(errors):,} of {len(records):,} records with --task_options skip_incomplete=true"
        raise InputError(errors[0].problem, f"{errors[0].fix.rstrip('.')}, or {leave_out}") from errors[0]
    return complete


def field(record: Record, names: str | Sequence[str], types: tuple[type, ...] = (str,)) -> Any:
    """The value of the first of these fields that the record has. Raises if missing, empty, or of another type."""
    names = (names,) if isinstance(names, str) else names
    name = next((name for name in names if name in record.row), None)
    if name is None:
        fields = ", ".join(map(str, record.row)) or "none"
        wanted = " or ".join(map(repr, names))
        raise InputError(
            f"{record.origin} has no field {wanted}; its fields are: {fields}", f"Rename a field to {names[0]!r}"
        )
    value = record.row[name]
    if not isinstance(value, types) or isinstance(value, bool):
        kinds = " or ".join({"str": "text", "list": "a list"}.get(t.__name__, t.__name__) for t in types)
        raise InputError(f"{record.origin}: {name} must be {kinds}, got {value!r:.80}", "Correct this field")
    if isinstance(value, str | list) and not (value.strip() if isinstance(value, str) else value):
        raise InputError(f"{record.origin}: {name} is empty", "Fill in the field or delete the record")
    return value


def as_record(row: Any, origin: str) -> Record:
    """A record of this row. Raises if the row is not a mapping of fields."""
    if not isinstance(row, dict):
        raise InputError(f"{origin}: expected an object with fields, got a {type(row).__name__}", 'Write {"prompt": …}')
    return Record(row, origin)


def to_dataset(records: Sequence[Record]) -> datasets.Dataset:
    """A dataset of these rows."""
    try:
        return datasets.Dataset.from_list([record.row for record in records])
    except Exception as error:  # many kinds, from pyarrow
        raise InputError(
            f"{records[0].origin} to {records[-1].origin}: a column has values of different types ({error})",
            "Use one type in each column",
        ) from error


def read(source: str, split: str = "train", subset: str | None = None) -> list[Record]:
    """The records of a file (.jsonl, .json, .parquet, .csv) or of a dataset on the hub."""
    path = Path(source)
    if path.suffix.lower() in SUFFIXES:
        if not path.is_file():
            raise InputError(f"The file {source} does not exist", f"Relative paths start in {Path.cwd()}")
        records = list(_READERS[path.suffix.lower()](path))
    elif path.exists():
        raise InputError(
            f"Cannot read {source}: its name ends in none of {', '.join(SUFFIXES)}", "Convert it to .jsonl"
        )
    else:
        records = _read_hub(source, split, subset)
    if not records:
        raise InputError(f"{source} is empty", "At least one problem is needed")
    return records


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"Cannot read {path} as text: {error}", "Convert the file to UTF-8") from error


def _read_jsonl(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise InputError(
                    f"{path}, line {number}: invalid JSON: {error}", "Correct or delete this line"
                ) from error
            yield as_record(row, f"{path}, line {number}")


def _read_json(path: Path) -> Iterator[Record]:
    try:
        rows = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        if error.msg.startswith("Extra data"):  # JSON lines in a file named .json
            yield from _read_jsonl(path)
            return
        raise InputError(f"{path}, line {error.lineno}: invalid JSON: {error.msg}", "Correct this line") from error
    if not isinstance(rows, list):
        raise InputError(
            f"{path}: expected a list of objects, got a {type(rows).__name__}", "Write [{…}, …] or use .jsonl"
        )
    yield from (as_record(row, f"{path}, record {number}") for number, row in enumerate(rows, 1))


def _read_csv(path: Path) -> Iterator[Record]:
    rows = csv.DictReader(_read_text(path).splitlines(keepends=True), strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():
                raise InputError(
                    f"{path}, line {rows.line_num} does not have {len(rows.fieldnames or ())} fields like the header",
                    "Quote fields that contain commas",
                )
            yield Record(row, f"{path}, line {rows.line_num}")
    except csv.Error as error:
        raise InputError(f"{path}, line {rows.reader.line_num}: invalid CSV: {error}", "Correct this line") from error


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow as arrow
    import pyarrow.parquet

    try:
        rows = arrow.parquet.read_table(path).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"Cannot read {path} as parquet: {error}", "Check the file") from error
    yield from (Record(row, f"{path}, record {number}") for number, row in enumerate(rows, 1))


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


def _read_hub(name: str, split: str, subset: str | None) -> list[Record]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", name) or name.startswith("."):
        raise InputError(f"The file {name} does not exist", "Pass a file, or a dataset on the hub as owner/name")
    name, _, given = name.partition(":")
    try:
        with fail_fast():
            data = datasets.load_dataset(name, given or subset, split=split)
    except Exception as error:  # many kinds, from huggingface_hub and datasets
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"Cannot load the dataset {name!r} from the hub: {reason}",
            "Check the name and the network connection, or pass a local file: --data FILE.jsonl",
        ) from error
    return [Record(row, f"{name} ({split}), record {number}") for number, row in enumerate(data, 1)]


def split(request: Request, train: list[Record], held_out: list[Record] | None) -> tuple[list[Record], list[Record]]:
    """Training and held-out problems of the requested sizes, with no problem in both.

    Held-out problems are chosen by a hash of their prompt, so they depend neither on the seed nor on the order of the
    file. Training problems are sampled with the seed.
    """
    source = request.data or request.name
    if held_out is None:
        unique = list({_key(record): record for record in reversed(train)}.values())
        size = request.eval_size or min(MAX_EVAL_SIZE, max(1, len(unique) // 10))
        if size >= len(unique):
            raise InputError(
                f"eval_size={size} leaves nothing to train on: {source} has {len(unique)} different problems",
                f"Use eval_size={max(1, len(unique) // 10)}, add problems, or pass --eval_data",
            )
        held_out = sorted(unique, key=_key)[:size]
    elif request.eval_size is not None:
        check_size(held_out, request.eval_size, "eval_size", request.eval_data or source)
        held_out = sorted(held_out, key=_key)[: request.eval_size]
    keys = {_key(record) for record in held_out}
    rest = [record for record in train if _key(record) not in keys]
    if not rest:
        raise InputError(f"All problems of {source} are also held out", "Evaluate on other problems")
    if request.train_size is not None:
        check_size(rest, request.train_size, "train_size", source)
        rest = random.Random(f"data {request.seed}").sample(rest, request.train_size)
    return rest, held_out


def _key(record: Record) -> str:
    return hashlib.sha256(json.dumps(record.row["prompt"], sort_keys=True, default=str).encode()).hexdigest()


def check_size(problems: Sized, size: int, name: str, source: str) -> None:
    """Raise if fewer than ``size`` problems are available."""
    if size > len(problems):
        raise InputError(
            f"{name}={size}, but {source} has only {len(problems)} problems", f"Use {name}={len(problems)}"
        )
