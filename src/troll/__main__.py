"""``python -m troll`` is ``troll``; ``accelerate launch -m troll train …`` runs it on several devices."""

import sys

from troll.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
