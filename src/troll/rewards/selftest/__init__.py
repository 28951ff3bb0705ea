"""Attacks on the rewards, to be tried on one's own machine."""
