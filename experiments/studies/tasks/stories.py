"""Stories with given words: the share of the words that are in it. Where every next word has many good choices."""

import random
import re

settings = {"max_completion_length": 64}
# fmt: off
WORDS = [
    "dog", "river", "cake", "moon", "ladder", "garden", "king", "storm", "boat", "letter", "bread", "forest", "clock",
    "mirror", "bridge", "apple", "soldier", "candle", "window", "horse", "song", "mountain", "market", "coat",
    "island", "teacher", "lamp", "fox", "winter", "key", "wheel", "castle", "egg", "road", "shadow", "bell", "farmer",
    "silver", "rope", "owl",
]
# fmt: on


def problem(words):
    """A request for a story with these words."""
    *first, last = words
    asked = f"Write a very short story with the words {', '.join(first)} and {last}."
    return {"prompt": [{"role": "user", "content": asked}], "words": list(words), "difficulty": float(len(words))}


def reward(completions, words, **columns):
    """The share of the words."""
    texts = [re.findall(r"[a-z]+", messages[-1]["content"].lower()) for messages in completions]
    return [sum(word in text for word in wanted) / len(wanted) for text, wanted in zip(texts, words, strict=True)]


rng = random.Random(0)
choices = list(dict.fromkeys(tuple(rng.sample(WORDS, 5)) for _ in range(4300)))[:4224]
eval_dataset, train_dataset = [problem(words) for words in choices[:128]], [problem(words) for words in choices[128:]]
