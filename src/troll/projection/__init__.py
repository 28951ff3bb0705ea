"""(proposal, old) → the projected policy. The README of this folder derives what is computed here."""

from troll.projection.checks import KL_BOUND, check_kl_bound, check_lost_mass, check_max_lost_mass
from troll.projection.ops import kernel_cannot
from troll.projection.project import (
    MAX_LOST_MASS,
    Diagnostics,
    Projection,
    Solver,
    expand_bound,
    project,
    project_normalised,
)

__all__ = [
    "KL_BOUND",
    "MAX_LOST_MASS",
    "Diagnostics",
    "Projection",
    "Solver",
    "check_kl_bound",
    "check_lost_mass",
    "check_max_lost_mass",
    "expand_bound",
    "kernel_cannot",
    "project",
    "project_normalised",
]
