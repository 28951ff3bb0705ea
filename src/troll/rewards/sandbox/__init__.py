"""The sandbox in which model-written code runs.

sandbox = Sandbox([module])
run = sandbox.start(module.function)
run.lines.ask(5.0, {"question": 1})
run.end().seconds
"""

from troll.rewards.sandbox.isolation import UNSANDBOXED_VARIABLE, Isolation, allow_unsandboxed, isolations
from troll.rewards.sandbox.sandbox import Ending, Sandbox, SandboxError, SandboxRun, best, status

__all__ = [
    "UNSANDBOXED_VARIABLE",
    "Ending",
    "Isolation",
    "Sandbox",
    "SandboxError",
    "SandboxRun",
    "allow_unsandboxed",
    "best",
    "isolations",
    "status",
]
