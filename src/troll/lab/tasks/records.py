"""Problems in files and on the hub, as records that know where they came from."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from troll.errors import InputError
from troll.lab.tasks.task import Row

KINDS = (".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True)
class Record:
    """One problem as it was read, and where: file and line, or the number of the record."""

    row: Row
    place: str


class Place(NamedTuple):
    """A file, or a data set on the hub with its split and subset."""

    source: str
    split: str = "train"
    subset: str | None = None


def read(source: str, split: str = "train", subset: str | None = None) -> list[Record]:
    """The records of a file (.jsonl, .json, .parquet, .csv), or of a data set on the hub."""
    path = Path(source)
    if path.suffix.lower() in KINDS:
        if not path.is_file():
            raise InputError(f"{source}, which does not exist", "a file", "the path from the folder you are in")
        records = list(_READERS[path.suffix.lower()](path))
    elif path.exists():
        raise InputError(f"{source}", f"a file that ends in {', '.join(KINDS)}", "converting it to JSON lines")
    else:
        records = _hub(source, split, subset)
    if not records:
        raise InputError(f"{source}, which is empty", "at least one problem", "another file")
    return records


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}, which cannot be read ({error})", "UTF-8 text", "converting the file") from error


def as_record(row: Any, place: str) -> Record:
    """A record of this row, if it has named fields."""
    if not isinstance(row, dict):
        raise InputError(f"{place}: a {type(row).__name__}", 'an object with named fields, {"…": …}', "that form")
    return Record(row, place)


def _jsonl(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise InputError(
                    f"{path}, line {number}: {error}", "one JSON object per line", "mending or deleting that line"
                ) from error
            yield as_record(row, f"{path}, line {number}")


def _json(path: Path) -> Iterator[Record]:
    try:
        rows = json.loads(_text(path))
    except json.JSONDecodeError as error:
        if error.msg.startswith("Extra data"):  # JSON lines under the name .json
            yield from _jsonl(path)
            return
        raise InputError(f"{path}, line {error.lineno}: {error.msg}", "JSON", "mending that line") from error
    if not isinstance(rows, list):
        raise InputError(f"{path}: a {type(rows).__name__}", "a list of objects, [{…}, …]", "that form, or JSON lines")
    yield from (as_record(row, f"{path}, record {number}") for number, row in enumerate(rows, 1))


def _csv(path: Path) -> Iterator[Record]:
    rows = csv.DictReader(_text(path).splitlines(keepends=True), strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():
                raise InputError(
                    f"{path}, line {rows.line_num}, which has another number of fields than the first line",
                    f"{len(rows.fieldnames or ())} fields",
                    "quoting fields that contain commas",
                )
            yield Record(row, f"{path}, line {rows.line_num}")
    except csv.Error as error:
        raise InputError(f"{path}, line {rows.reader.line_num}: {error}", "CSV", "mending that line") from error


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow as arrow
    import pyarrow.parquet

    try:
        rows = arrow.parquet.read_table(path).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"{path}, which cannot be read ({error})", "a parquet file", "another file") from error
    yield from (Record(row, f"{path}, record {number}") for number, row in enumerate(rows, 1))


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _hub(name: str, split: str, subset: str | None) -> list[Record]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", name) or name.startswith("."):
        raise InputError(f"{name!r}, which does not exist", "a file, or owner/name on the hub", "checking the path")
    name, _, given = name.partition(":")
    try:
        with _no_retries(name):
            data = datasets.load_dataset(name, given or subset, split=split)
    except Exception as error:  # of the hub's client and of data sets, of many kinds
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"the data set {name!r} of the hub, which cannot be loaded ({reason})",
            "the name of a data set, and a network or a copy of it in the cache",
            "checking the name; without a network, a local file: --data FILE.jsonl",
        ) from error
    return [Record(row, f"{name} ({split}), record {number}") for number, row in enumerate(data, 1)]


@contextmanager
def _no_retries(name: str) -> Iterator[None]:
    """Without a network, fail at once or take what is in the cache, where the client would try for half a minute."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    before = constants.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=10)
    except HfHubHTTPError:
        pass  # the hub replied: what is wrong is said by who loads it
    except Exception:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def need(record: Record, names: str | Sequence[str], types: tuple[type, ...] = (str,)) -> Any:
    """The first field of these names that the record has; missing, of another type or empty is an error."""
    names = (names,) if isinstance(names, str) else names
    name = next((name for name in names if name in record.row), None)
    wanted = f"the field {' or '.join(map(repr, names))}"
    if name is None:
        found = ", ".join(map(str, record.row)) or "no fields"
        raise InputError(f"{record.place}: {found}", wanted, f"renaming a field to {names[0]!r}")
    value = record.row[name]
    kinds = " or ".join({"str": "text", "list": "a list"}.get(t.__name__, t.__name__) for t in types)
    if not isinstance(value, types) or isinstance(value, bool):
        raise InputError(f"{record.place}: {name}={value!r:.80}", f"{wanted}, {kinds}", "mending that field")
    if isinstance(value, str | list) and not (value.strip() if isinstance(value, str) else value):
        raise InputError(f"{record.place}: {name} is empty", f"{wanted}, {kinds}", "filling or deleting the record")
    return value


def to_dataset(records: Sequence[Record]) -> datasets.Dataset:
    """A data set of these rows."""
    try:
        return datasets.Dataset.from_list([record.row for record in records])
    except Exception as error:  # of pyarrow, of many kinds
        raise InputError(
            f"{records[0].place} to {records[-1].place} ({error})", "one type in each column", "making them alike"
        ) from error
