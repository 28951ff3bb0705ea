"""Hydra groups for verl: ``'hydra.searchpath=[pkg://troll.verl.configs]' +trust_region=troll``."""
