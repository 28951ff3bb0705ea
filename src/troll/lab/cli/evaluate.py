"""``troll eval``."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from troll.errors import InputError
from troll.lab.cli.main import Parser, existing_folder
from troll.lab.runs import Run, write_json
from troll.lab.runs.folder import COMPARISON, CONFIG, EVALUATION

DESCRIPTION = """\
Sample several answers to each held-out problem and compute pass@1, pass@k and majority vote.

  troll eval arithmetic-troll                         a run, before and after training; updates its report
  troll eval runs/arithmetic-troll --samples 16 --k 1 4 16
  troll eval --model smollm2-135m --task arithmetic   any model on any task
  troll eval --model Qwen/Qwen2.5-1.5B-Instruct --task gsm8k --problems 100 --output gsm8k.json

pass@k is the probability that at least one of k samples is right (unbiased estimate from all samples). Majority is the
share of problems whose most frequent answer is right; ties share the credit, samples without an answer do not vote. A
sample is right if its reward is 1. Intervals are 95 % confidence intervals over problems: Wilson's for 0/1 scores,
otherwise a bootstrap. Before and after are compared per problem. Results depend on seed and batch size only.
"""
PROBLEMS = 200
_TASK_FLAGS = ("task", "data", "eval_data", "task_options", "reward")


@dataclass(frozen=True)
class _Subject:
    """A task, the models to evaluate on it, and the settings of the training."""

    task: Any
    models: list[tuple[str, Callable[[], tuple[Any, Any]]]]
    """Label, and a function that loads the model and its tokenizer."""
    settings: dict[str, Any]
    """Sampling settings of the training, such as temperature."""


def run(argv: Sequence[str]) -> int:
    """Evaluate, print, and write the result."""
    options = _parse(argv)
    folder = None if options.run is None else existing_folder(options.run, options.runs_dir, "run")
    from troll.lab.cli.train import quiet
    from troll.lab.training.evaluate import MAJORITY, Scores, as_json, difference, evaluate

    quiet()
    subject = _model_and_task(options) if folder is None else _trained(folder)
    problems = _problems(subject.task.eval_dataset, options.problems, folder)
    how = _sampling(options, subject)
    measures = [*(f"pass@{k}" for k in options.k or sorted({1, how.samples})), MAJORITY]
    console = Console()
    size = f"{len(problems)} held-out problems, {how.samples} samples each"
    console.print(f"{subject.task.name}: {size}", highlight=False, markup=False, soft_wrap=True)
    scores: dict[str, Scores] = {}
    for label, load in subject.models:
        with _shown(console, label, len(problems) * how.samples) as advance:
            scores[label] = evaluate(*load(), subject.task, problems, how, advance)
        gc.collect()
    result: dict[str, Any] = {
        "task": subject.task.name,
        "problems": len(problems),
        "samples": how.samples,
        "temperature": how.temperature,
        "max_completion_length": how.max_completion_length,
        "seed": how.seed,
        "models": [{"label": label, **found.summary(measures)} for label, found in scores.items()],
    }
    if folder is not None:
        pairs = {name: difference(scores["after"], scores["before"], name) for name in measures}
        result["difference"] = {name: as_json(found) for name, found in pairs.items()}
    _print(result, measures, console)
    _write(result, options.output, folder)
    return 0


def check(argv: Sequence[str]) -> None:
    """Raise if these flags are invalid."""
    if not {"-h", "--help"} & set(argv):
        _parse(argv)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("troll eval", DESCRIPTION)
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="the name or folder of a run; or pass --model")
    what = parser.add_argument_group("without a run")
    what.add_argument("--model", help="a folder, a name on the hub, or smollm2-135m")
    what.add_argument("--task", help="as in `troll train` (default: arithmetic)")
    what.add_argument("--data", help="as in `troll train`")
    what.add_argument("--eval_data", "--eval-data", metavar="DATA", help="the held-out problems")
    what.add_argument("--task_options", "--task-options", nargs="+", metavar="KEY=VALUE", help="options of the task")
    what.add_argument(
        "--reward", nargs="+", help="module:function or file.py:function in place of the rewards of the task"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--problems", type=int, metavar="N", help=f"number of problems (default: {PROBLEMS}, or all if there are fewer)"
    )
    how.add_argument("--samples", type=int, default=8, metavar="N", help="samples per problem")
    how.add_argument("--k", type=int, nargs="+", help="which pass@k (default: 1 and the number of samples)")
    how.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature (default: that of the run, or 1.0)"
    )
    how.add_argument("--batch_size", "--batch-size", type=int, default=64, metavar="N", help="completions per batch")
    how.add_argument(
        "--max_completion_length", "--max-completion-length", type=int, metavar="N",
        help="maximum tokens per completion (default: that of the run, or of the task)",
    )  # fmt: skip
    how.add_argument("--seed", type=int, default=0, help="random seed of the samples")
    how.add_argument(
        "--allow_unsandboxed_code", "--allow-unsandboxed-code", action="store_true",
        help="if there is no sandbox, run model-written code without one",
    )  # fmt: skip
    how.add_argument(
        "--output", metavar="FILE", help="the JSON file to write (default for a run: eval.json in its folder)"
    )
    how.add_argument(
        "--runs_dir",
        "--runs-dir",
        default="runs",
        metavar="DIR",
        help="the folder in which names of runs are looked up",
    )
    options = parser.parse_args(argv)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    example = "For example: troll eval arithmetic-troll, or troll eval --model smollm2-135m --task arithmetic"
    if (options.run is None) == (options.model is None):
        problem = "Pass a run or --model" if options.run is None else f"Pass either the run {options.run} or --model"
        raise InputError(problem, example)
    also = [f"--{name}" for name in _TASK_FLAGS if getattr(options, name) is not None]
    if options.run is not None and also:
        raise InputError(
            f"{', '.join(also)} cannot be set for a run: {options.run} is evaluated on the task it was trained on",
            example,
        )
    for name in ("problems", "samples", "batch_size", "max_completion_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}", f"Leave --{name} out for the default")
    for k in options.k or ():
        if not 1 <= k <= options.samples:
            raise InputError(
                f"--k must be between 1 and the number of samples, {options.samples}, got {k}",
                f"Use --samples {max(k, 1)}",
            )
    if options.k and len(set(options.k)) < len(options.k):
        raise InputError(f"--k {' '.join(map(str, options.k))} repeats a value", "For example: --k 1 8")


def _sampling(options: argparse.Namespace, subject: _Subject) -> Any:
    from troll.lab.training.evaluate import Sampling

    settings = {"temperature": 1.0, "max_completion_length": 256, **subject.task.settings, **subject.settings}
    chosen = {name: getattr(options, name) for name in ("temperature", "max_completion_length")}
    return Sampling(
        samples=options.samples,
        batch_size=options.batch_size,
        seed=options.seed,
        chat_template_kwargs=settings.get("chat_template_kwargs") or {},
        **{name: settings[name] if value is None else value for name, value in chosen.items()},
    )


def _model_and_task(options: argparse.Namespace) -> _Subject:
    from troll.lab.cli.train import options_of
    from troll.lab.models import load_config
    from troll.lab.tasks import load_task
    from troll.rewards.sandbox import allow_unsandboxed

    allow_unsandboxed(options.allow_unsandboxed_code)
    name = options.task or "arithmetic"
    makes_problems = name == "arithmetic" or name.startswith("gym:")
    load_config(options.model)
    task = load_task(
        name,
        data=options.data,
        eval_data=options.eval_data,
        options=options_of(options.task_options or ()),
        reward=options.reward or (),
        eval_size=(options.problems or PROBLEMS) if makes_problems else None,
    )
    return _Subject(task, [(options.model, lambda: _load(options.model))], {})


def _trained(folder: Path) -> _Subject:
    """A run with the split of its training, so that no held-out problem was trained on."""
    from troll.lab.cli.flags import Flags
    from troll.lab.cli.train import options_of
    from troll.lab.tasks import load_task
    from troll.rewards.sandbox import allow_unsandboxed

    if (folder / COMPARISON).is_file():
        raise InputError(
            f"{folder} is a comparison, not a run",
            f"Evaluate one of its runs, such as {folder / 'troll-0'}; this needs --keep_models true",
        )
    about = Run.open(folder).about
    trained = folder / "model"
    adapter = (trained / "adapter_config.json").is_file()
    if not adapter and not (trained / "config.json").is_file():
        raise InputError(
            f"The run {folder} ({about['status']}) has no trained model",
            f"Finish it with: troll train --resume {folder}"
            if about["status"] != "finished"
            else "Train without --save_model false, or with --keep_models true in a comparison",
        )
    flags = Flags(["--config", str(folder / CONFIG)])
    trained_with = flags.run()
    allow_unsandboxed(trained_with.allow_unsandboxed_code)
    task = load_task(
        trained_with.task,
        data=trained_with.data,
        eval_data=trained_with.eval_data,
        options=options_of(trained_with.task_options),
        reward=trained_with.reward,
        train_size=trained_with.train_size,
        eval_size=trained_with.eval_size,
        seed=about["seed"],
    )
    origin = {"revision": "model_revision", "trust_remote_code": "trust_remote_code"}
    base = {name: value for name, flag in origin.items() if (value := flags.value(flag, None)) is not None}
    before = (trained_with.model, base, None)
    after = (trained_with.model, base, trained) if adapter else (str(trained), {}, None)
    models = [("before", lambda: _load(*before)), ("after", lambda: _load(*after))]
    kept = ("temperature", "max_completion_length", "chat_template_kwargs")
    return _Subject(task, models, {name: about["settings"][name] for name in kept if about["settings"].get(name)})


def _load(name: str, options: dict[str, Any] | None = None, adapter: Path | None = None) -> tuple[Any, Any]:
    """A model and its tokenizer, in bf16 if the GPU supports it, else in fp32."""
    import torch

    from troll.lab.models import load_model, load_tokenizer

    options = options or {}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    halves = device.type == "cuda" and torch.cuda.is_bf16_supported()
    model = load_model(name, dtype=torch.bfloat16 if halves else torch.float32, **options)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    return model.to(device).eval(), load_tokenizer(name, padding_side="left", **options)


def _problems(eval_dataset: Any, wanted: int | None, folder: Path | None) -> Any:
    if wanted is not None and wanted > len(eval_dataset):
        which = "the task has" if folder is None else "the run held out"
        raise InputError(
            f"--problems {wanted}, but {which} only {len(eval_dataset)} problems", f"Use --problems {len(eval_dataset)}"
        )
    return eval_dataset.select(range(min(wanted or PROBLEMS, len(eval_dataset))))


@contextmanager
def _shown(console: Console, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, otherwise a line."""
    if not console.is_terminal:
        console.print(f"{label}: sampling {total} completions", highlight=False, markup=False, soft_wrap=True)
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(24), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda many: bar.advance(task, many)


def _print(result: dict[str, Any], measures: Sequence[str], console: Console) -> None:
    models, change = result["models"], result.get("difference")
    rows = [
        [name, *(_share(model[name]) for model in models), *([_change(change[name])] if change else [])]
        for name in measures
    ]
    levels = list(models[0].get("by_difficulty", ()))
    if len(levels) > 1:
        rows += [[f"pass@1, difficulty {x}", *(_share(model["by_difficulty"][x]) for model in models)] for x in levels]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("", *(model["label"] for model in models), *(["difference"] if change else [])):
        table.add_column(Text(header))
    for row in rows:
        table.add_row(*row)
    (console if console.is_terminal else Console(width=160)).print(table, highlight=False)


def _share(found: dict[str, float | None]) -> str:
    """A share in percent, with its interval.

    >>> _share({"value": 0.5, "low": 0.25, "high": 0.75})
    '50.0 %  (25.0 to 75.0)'
    """
    return f"{100 * (found['value'] or 0):.1f} %{_ends(found, '.1f')}"


def _change(found: dict[str, float | None]) -> str:
    return f"{100 * (found['value'] or 0):+.1f}{_ends(found, '+.1f')}".replace("-", "−")


def _ends(found: dict[str, float | None], form: str) -> str:
    low, high = found["low"], found["high"]
    return "" if low is None or high is None else f"  ({100 * low:{form}} to {100 * high:{form}})"


def _write(result: dict[str, Any], output: str | None, folder: Path | None) -> None:
    if output is not None:
        path = Path(output)
    elif folder is not None:
        path = folder / EVALUATION
    else:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
    except OSError as error:
        raise InputError(f"Cannot write --output {path}: {error.strerror}", "Choose another path") from error
    print(f"Written: {path}")
    if output is None and folder is not None and (folder / "report.html").is_file():
        from troll.lab.report import write_report

        print(f"Report: {write_report(folder, figures=(folder / 'figures').is_dir())}")
