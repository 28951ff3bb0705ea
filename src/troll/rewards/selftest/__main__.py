"""``python -m troll.rewards.selftest``: run the attacks on this machine, as ``troll doctor --attack`` does."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from troll.rewards.sandbox import isolations
from troll.rewards.selftest import suite


def main() -> int:
    """Print a line for every attack; 1 if one succeeded that is not known to."""
    found = {isolation.name: isolation for isolation in isolations()}
    parser = argparse.ArgumentParser("python -m troll.rewards.selftest", description=main.__doc__)
    parser.add_argument("--isolation", choices=found, help="the walls to try (the best there are)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--list", action="store_true", help="only the names of the attacks")
    parser.add_argument("names", nargs="*", help="attacks to make (all)")
    options = parser.parse_args()
    if options.list:
        print("\n".join(suite.names()))
        return 0
    bad = 0
    for result in suite.run(found.get(options.isolation), options.names or None):
        bad += not (result.held or result.known)
        verdict = "held" if result.held else "known" if result.known else "SUCCEEDED"
        line = f"{result.category:10} {result.name:36} {verdict:10} {result.seconds:5.1f} s  {result.detail}"
        print(json.dumps(asdict(result)) if options.json else line.rstrip(), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
