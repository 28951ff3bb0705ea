"""The method inside other people's trainers: translations between their batches and ours, no formulas.

``troll.adapters.trl`` is for TRL's ``GRPOTrainer``, ``troll.adapters.verl`` for verl on Ray.
"""
