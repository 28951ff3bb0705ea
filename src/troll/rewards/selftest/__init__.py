"""Attacks on the rewards and the sandbox, to run on your own machine."""
