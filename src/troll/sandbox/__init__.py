"""Where model-written code runs, and what it cannot do there.

sandbox = Sandbox([module])
run = sandbox.start(module)
run.lines.ask(5.0, {"question": 1})
run.end().seconds
"""

from troll.sandbox.isolation import DANGER, Isolation, admit_danger, isolations
from troll.sandbox.sandbox import Ending, Run, Sandbox, SandboxError, best, status

__all__ = [
    "DANGER",
    "Ending",
    "Isolation",
    "Run",
    "Sandbox",
    "SandboxError",
    "admit_danger",
    "best",
    "isolations",
    "status",
]
