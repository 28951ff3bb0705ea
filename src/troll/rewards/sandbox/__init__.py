"""Where model-written code runs, and what it cannot do there.

sandbox = Sandbox([module])
run = sandbox.start(module)
run.lines.ask(5.0, {"question": 1})
run.end().seconds
"""

from troll.rewards.sandbox.isolation import DANGER, Isolation, allow_unsandboxed, isolations
from troll.rewards.sandbox.sandbox import Ending, Run, Sandbox, SandboxError, best, status

__all__ = [
    "DANGER",
    "Ending",
    "Isolation",
    "Run",
    "Sandbox",
    "SandboxError",
    "allow_unsandboxed",
    "best",
    "isolations",
    "status",
]
