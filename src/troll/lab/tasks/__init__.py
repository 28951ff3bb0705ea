"""Tasks: prompts, rewards that can be checked, problems held out to measure progress.

task = load_task("arithmetic", options={"digits": 2})
task.train[0]["prompt"], task.reward_funcs, task.held_out
"""

from troll.lab.tasks.load import load_task, task_names
from troll.lab.tasks.rewards import RewardError
from troll.lab.tasks.task import Task, exact_match, first_line, text_of

__all__ = ["RewardError", "Task", "exact_match", "first_line", "load_task", "task_names", "text_of"]
