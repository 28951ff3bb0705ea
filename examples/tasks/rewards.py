"""A reward function of one's own, for ``--reward rewards.py:short``."""


def short(completions, **columns):
    """1 for an empty completion, less for longer ones; None, which leaves it out, for one that is only spaces."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [None if text.isspace() else 1 / (1 + len(text)) for text in texts]
