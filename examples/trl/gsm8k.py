"""Train a model on the word problems of GSM8K with TROLL.

    python gsm8k.py --tiny                                try it: no download, no GPU, seconds
    python gsm8k.py                                       Qwen2.5-1.5B-Instruct on one GPU
    python gsm8k.py --dataset train.jsonl                 a file with "question" and "answer", JSON lines or parquet
    python gsm8k.py --trust_region clip --measure_kl      PPO's clip on the same schedule, to compare
    python gsm8k.py --config my.yaml --kl_bound 0.02      settings from a file, some of them changed
    accelerate launch --num_processes 4 gsm8k.py          four GPUs: 256 prompts per rollout, as the authors

The settings are the authors': learning rate 1e-6, constant; 8 samples per prompt; 8 updates per rollout; preset paper;
no reference KL. On one GPU a rollout has 64 prompts, a quarter of theirs. A completion earns 1 if it ends in "####" and
the right number, else 0. Watch reward, troll/projected_fraction and troll/kept_mass/old (docs/trl.md).
Every field of TROLLConfig (TRL's GRPOConfig and the trust region) is a flag below, and a key of the YAML file.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from trl import ModelConfig, TrlParser, get_peft_config

from troll.trl import TROLLConfig, TROLLTrainer

SYSTEM = (
    "Solve the problem step by step. End with a line that has #### and the final answer as a plain number, "
    "for example: #### 42"
)
SETTINGS: dict[str, Any] = {  # what differs from the defaults of TROLLConfig and ModelConfig
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "output_dir": "gsm8k-troll",
    "preset": "paper",  # the authors'; the default, kl_bound 0.2, was faster in our runs (docs/does-it-help.md)
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,  # 64 completions per update and GPU; the authors' 256 on four
    "num_train_epochs": 1,
    "logging_steps": 1,
}
PROBLEMS = [  # for --tiny
    {"question": "Mia has 3 bags of 4 apples. How many apples has she?", "answer": "3 * 4 = 12\n#### 12"},
    {"question": "A shop sold 250 loaves a day for 5 days. How many?", "answer": "250 * 5 = 1,250\n#### 1,250"},
    {"question": "It was 2 degrees and fell by 7. How cold is it?", "answer": "2 - 7 = -5\n#### -5"},
    {"question": "Tom reads 12 pages a day. How many in a week?", "answer": "12 * 7 = 84\n#### 84"},
]


@dataclass
class Task:
    """What this program takes beyond TRL's and TROLL's settings."""

    dataset: str = field(
        default="openai/gsm8k",
        metadata={"help": "Name on the hub, or a .jsonl, .json or .parquet file with 'question' and 'answer'."},
    )
    eval_dataset: str | None = field(
        default=None,
        metadata={"help": "The same, for evaluation: 'openai/gsm8k' is its test split. Needs --eval_strategy steps."},
    )
    tiny: bool = field(
        default=False,
        metadata={
            "help": "Try it: an untrained model of a few thousand parameters, four problems, 16 steps, on a CPU. On "
            "the command line only."
        },
    )


class Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """The description as it is written, and the default of every flag."""


def flags(task: type, settings: dict[str, Any], doc: str) -> TrlParser:
    """A flag for every field of the task, of TROLLConfig and of TRL's ModelConfig, with these settings as defaults."""
    parser = TrlParser(
        (task, TROLLConfig, ModelConfig), usage="%(prog)s [flags]", description=doc, formatter_class=Help
    )
    parser.set_defaults_with_config(**settings)
    return parser


def parse(task: type, settings: dict[str, Any], doc: str) -> Any:
    """The settings of the program, replaced by those of a YAML file, replaced by flags: task, training, model."""
    parser = flags(task, settings, doc)
    if "--tiny" in sys.argv:
        import tiny_models

        parser.set_defaults_with_config(**tiny_models.settings())
    return parser.parse_args_and_config()


def model_options(args: TROLLConfig, model: ModelConfig) -> dict[str, Any]:
    """The flags about the model, for ``from_pretrained``."""
    given = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    return {**given, **(args.model_init_kwargs or {})}


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####``, if the text ends with it; None otherwise.

    >>> final_number("3 * 400 is 1200\\n#### $1,200.00")
    Decimal('1200.00')
    """
    end = text[max(0, text.rfind("####")) :]
    match = re.fullmatch(r"####\s*(-?)\$?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(\.[0-9]+)?\.?\s*", end)
    return Decimal("".join(part or "" for part in match.groups()).replace(",", "")) if match else None


def exact_match(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for the right final number, 0 for a wrong one and for none."""
    return [float(final_number(c[0]["content"]) == Decimal(a)) for c, a in zip(completions, answer, strict=True)]


def digits(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Share of digits. For --tiny: an untrained model never ends in ``####``, and without reward nothing moves."""
    return [sum(c.isdigit() for c in x[0]["content"]) / max(1, len(x[0]["content"])) for x in completions]


def load(name: str, split: str) -> Dataset:
    """Chat prompts and right answers, from the hub or from a file."""
    file = Path(name)
    if file.suffix in (".jsonl", ".json", ".parquet"):
        if not file.exists():
            raise SystemExit(f"{name} does not exist; give a file, or a name on the hub such as openai/gsm8k")
        data = load_dataset("parquet" if file.suffix == ".parquet" else "json", data_files=name, split="train")
    else:
        data = load_dataset(name, "main", split=split)
    return as_prompts(data, name)


def as_prompts(data: Dataset, name: str) -> Dataset:
    """Questions and worked answers → chat prompts and right answers."""
    if not {"question", "answer"} <= set(data.column_names):
        raise SystemExit(f"{name} has the columns {', '.join(data.column_names)}; expected question and answer")

    def prompt(row: dict[str, str]) -> dict[str, Any]:
        number = final_number(row["answer"])
        if number is None:
            raise SystemExit(f"{name} has an answer that does not end in '#### number': {row['answer'][-80:]!r}")
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
        return {"prompt": messages, "answer": str(number)}

    return data.map(prompt, remove_columns=data.column_names)


def prepare(task: Task, args: TROLLConfig, model: ModelConfig) -> tuple[Dataset, Dataset | None, list[Callable]]:
    """Training data, evaluation data and rewards. With --tiny, the model is made here."""
    if task.tiny:
        import tiny_models

        model.model_name_or_path = tiny_models.save_once("dense", Path(args.output_dir) / "tiny-model", args)
        return as_prompts(Dataset.from_list(PROBLEMS * 8), "PROBLEMS"), None, [exact_match, digits]
    evaluation = None if task.eval_dataset is None else load(task.eval_dataset, "test")
    return load(task.dataset, "train"), evaluation, [exact_match]


def run(trainer: TROLLTrainer) -> None:
    """Train, and save the model and what was logged."""
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.print(f"The model and all that was logged (trainer_state.json): {trainer.args.output_dir}")
    trainer.accelerator.end_training()


def main() -> None:
    """Put the parts together."""
    task, args, model = parse(Task, SETTINGS, __doc__)
    train, evaluation, rewards = prepare(task, args, model)
    args.model_init_kwargs = model_options(args, model)
    trainer = TROLLTrainer(
        model=model.model_name_or_path,
        reward_funcs=rewards,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        peft_config=get_peft_config(model),  # with --use_peft; see lora.py
    )
    run(trainer)


if __name__ == "__main__":
    main()
