"""Tasks: prompts, reward functions and held-out problems.

task = load_task("arithmetic", options={"digits": 2})
task.train_dataset[0]["prompt"], task.reward_funcs, task.eval_dataset
"""

from troll.lab.tasks.load import find_reward, load_task, task_names
from troll.lab.tasks.task import Task, exact_match, first_line, text_of

__all__ = ["Task", "exact_match", "find_reward", "first_line", "load_task", "task_names", "text_of"]
