"""A training run from its settings to its folder: what ``troll train`` does."""
