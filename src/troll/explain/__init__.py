"""What happened in a run, in words: signs of trouble, and what to change.

``docs/explain.md`` lists the rules. Nothing here needs torch or a trainer.
"""

from troll.explain.finding import Change, Finding
from troll.explain.history import History
from troll.explain.paragraphs import Explanation, explain
from troll.explain.rules import RULES, Watch, changes, find

__all__ = ["RULES", "Change", "Explanation", "Finding", "History", "Watch", "changes", "explain", "find"]
