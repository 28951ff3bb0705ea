#!/usr/bin/env bash
# The embedded default under five arms with three seeds. The numbers in comparison.json are from two cores of an AMD EPYC,
# one run after the other, 41 minutes; on a GPU add --bf16 false --jobs 15 for all at a time in the same precision.
set -euo pipefail
troll compare --arms troll clip clip-higher gspo none --seeds 0 1 2 --runs_dir "${1:-runs}"
