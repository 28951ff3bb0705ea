"""Hydra groups for verl: ``'hydra.searchpath=[pkg://troll.adapters.verl.configs]' +trust_region=troll``."""
