"""Train a model with a reward model and TROLL, for tasks where no program can check the answer.

    python preference.py --tiny                                     try it: no download, no GPU, seconds
    python preference.py                                            Qwen2.5-1.5B-Instruct and Skywork's reward model
    python preference.py --reward_model NAME_OR_FOLDER              another one: a sequence classifier with one output
    python preference.py --beta 0.01                                and stay near the model it started from

kl_bound and beta limit different distances. kl_bound limits each update: how far a token's distribution may be from the
policy that generated the rollout. beta is the coefficient of the KL to the model at the start of training, over the
whole run; it needs a second copy of the model. A reward model can be fooled: read completions (--log_completions), not
only rewards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from gsm8k import model_options, parse, run
from transformers import AutoModelForSequenceClassification

from troll.trl import TROLLTrainer

SETTINGS: dict[str, Any] = {  # what differs from the defaults of TROLLConfig and ModelConfig
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "output_dir": "preference-troll",
    "preset": "paper",  # the authors', as in gsm8k.py
    "lr_scheduler_type": "constant",
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 1,
    "logging_steps": 1,
}
PROMPTS = ["Write a line about rain.", "Name a fruit.", "Say hello.", "Why is the sky blue?"]  # for --tiny


@dataclass
class Task:
    """What this program takes beyond TRL's and TROLL's settings."""

    dataset: str = field(
        default="trl-lib/ultrafeedback-prompt",
        metadata={"help": "Name on the hub, or a .jsonl, .json or .parquet file, with 'prompt': a text or a chat."},
    )
    reward_model: str = field(
        default="Skywork/Skywork-Reward-V2-Qwen3-0.6B",
        metadata={"help": "Name or folder of a sequence classifier with one output, the reward."},
    )
    tiny: bool = field(
        default=False,
        metadata={
            "help": "Try it: untrained models of a few thousand parameters, four prompts, 16 steps, on a CPU. On the "
            "command line only."
        },
    )


def load(name: str) -> Dataset:
    """Prompts, from the hub or from a file."""
    file = Path(name)
    if file.suffix in (".jsonl", ".json", ".parquet"):
        if not file.exists():
            raise SystemExit(f"{name} does not exist; give a file, or a name on the hub")
        data = load_dataset("parquet" if file.suffix == ".parquet" else "json", data_files=name, split="train")
    else:
        data = load_dataset(name, split="train")
    if "prompt" not in data.column_names:
        raise SystemExit(f"{name} has the columns {', '.join(data.column_names)}; expected prompt")
    chat = isinstance(data[0]["prompt"], list)
    return data if chat else data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def main() -> None:
    """Load the data and the models, train, and save."""
    task, args, model = parse(Task, SETTINGS, __doc__)
    if task.tiny:
        import tiny_models

        folder = Path(args.output_dir)
        model.model_name_or_path = tiny_models.save_once("dense", folder / "tiny-model", args)
        task.reward_model = tiny_models.save_once("reward", folder / "tiny-reward-model", args)
        data = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS * 8]})
    else:
        data = load(task.dataset)
    args.model_init_kwargs = model_options(args, model)
    trainer = TROLLTrainer(
        model=model.model_name_or_path,
        # As a name, TRL would load it with the revision and the options of the model that is trained.
        reward_funcs=AutoModelForSequenceClassification.from_pretrained(
            task.reward_model, num_labels=1, dtype=model.dtype
        ),
        args=args,
        train_dataset=data,
    )
    run(trainer)


if __name__ == "__main__":
    main()
