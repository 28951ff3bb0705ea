"""(proposal, old) → the projected policy. The README of this folder derives what is computed here."""

from troll.projection.project import (
    MAX_LOST_MASS,
    Projection,
    Solver,
    check_kl_bound,
    check_lost_mass,
    project,
    project_normalised,
)

__all__ = [
    "MAX_LOST_MASS",
    "Projection",
    "Solver",
    "check_kl_bound",
    "check_lost_mass",
    "project",
    "project_normalised",
]
