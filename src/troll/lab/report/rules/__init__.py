"""What happened in a run, in words: signs of trouble, and what to change.

``docs/explain.md`` lists the rules. Nothing here needs torch or a trainer.
"""

from troll.lab.report.rules.all_rules import RULES, Watch, changes, find
from troll.lab.report.rules.finding import Change, Finding
from troll.lab.report.rules.history import History
from troll.lab.report.rules.paragraphs import Explanation, explain

__all__ = ["RULES", "Change", "Explanation", "Finding", "History", "Watch", "changes", "explain", "find"]
