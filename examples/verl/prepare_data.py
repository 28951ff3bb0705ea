"""Write a task of ``troll train`` for verl: train.parquet, held_out.parquet, and task.json for the reward.

python prepare_data.py mbpp data/code
python prepare_data.py code data/code --data problems.jsonl
python prepare_data.py gym:gcd data/gcd --options shots=1 --train_size 4000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from troll.lab.cli.train import options_of
from troll.lab.tasks import load_task
from troll.lab.training.settings import RunSettings
from troll.lab.verl.data import request_of, write_task


def main() -> None:
    """Write the files and print the keys of verl that name them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="gsm8k, math, mbpp, humaneval, code, gym:NAME, data, or a Python file")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", help="file with the problems, for tasks that read one")
    parser.add_argument("--eval_data", help="file with the held-out problems")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="options of the task")
    parser.add_argument(
        "--reward", nargs="*", default=[], metavar="FILE.py:FUNCTION", help="replaces the reward of the task"
    )
    parser.add_argument("--train_size", type=int)
    parser.add_argument("--eval_size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    settings = RunSettings(
        task=given.task,
        data=given.data,
        eval_data=given.eval_data,
        reward=given.reward,
        train_size=given.train_size,
        eval_size=given.eval_size,
    )
    request = request_of(settings, options_of(given.options), given.seed, None)
    task = load_task(**request["task"])
    if isinstance(task.train_dataset[0]["prompt"], str):
        parser.error(f"{given.task} has prompts of plain text, which verl renders as chats: troll train --engine verl")
    write_task(task, request, given.folder)
    print(
        f"{task.description}: {len(task.train_dataset)} problems, {len(task.eval_dataset)} held out, in {given.folder}"
    )
    print("reward.custom_reward_function.path=pkg://troll.lab.verl.data")
    print("reward.custom_reward_function.name=score")
    print(f"+reward.custom_reward_function.reward_kwargs.task={(given.folder / 'task.json').absolute()}")


if __name__ == "__main__":
    main()
