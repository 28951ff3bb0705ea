#!/usr/bin/env bash
# The embedded default under five arms with three seeds, TROLL with the authors' bound. The numbers in comparison.json are from one H200 in fp32, all
# runs at a time; on a CPU leave --bf16 and --jobs out: one run takes about three minutes on two cores.
set -euo pipefail
troll compare --arms troll clip clip-higher gspo none --seeds 0 1 2 --kl_bound 0.05 --jobs 15 --bf16 false --runs_dir "${1:-runs}"
