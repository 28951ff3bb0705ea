"""Rewards for programs and mathematical answers, as plain functions for TRL, verl or any other trainer.

trainer = GRPOTrainer(model, reward_funcs=[code_reward], train_dataset=problems_with_tests)
"""

from troll.rewards.code import CodeReward, code_reward
from troll.rewards.judge import Verdict
from troll.rewards.mathematics import MathReward, math_reward
from troll.rewards.problems import Problem, read_problem

__all__ = ["CodeReward", "MathReward", "Problem", "Verdict", "code_reward", "math_reward", "read_problem"]
