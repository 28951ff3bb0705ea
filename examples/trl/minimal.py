"""Train a language model to add, by reinforcement learning with TRL.

    python minimal.py            Qwen2.5-0.5B-Instruct on a GPU
    python minimal.py --tiny     an untrained model of a few thousand parameters, on a CPU in seconds

Prints the log and saves the model.
"""

import argparse
import random
import re

from datasets import Dataset

from troll.trl import TROLLConfig, TROLLTrainer


def sums(n: int) -> Dataset:
    """``n`` sums of two-digit numbers, as chat prompts with the right answer."""
    rng = random.Random(0)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(n)]
    prompts = [[{"role": "user", "content": f"What is {a} + {b}? Reply with the number only."}] for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in pairs]})


def right_number(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 for the right number, and up to 0.1 for digits where other characters could be."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion[0]["content"].strip()
        rewards.append(1.0 if text == right else 0.1 * len(re.findall(r"\d", text)) / max(1, len(text)))
    return rewards


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="name or folder of the model to train")
    parser.add_argument("--output_dir", default="minimal", help="where the trained model goes")
    parser.add_argument("--tiny", action="store_true", help="try it: a tiny untrained model, 16 steps, no GPU")
    options = parser.parse_args()
    settings = {"per_device_train_batch_size": 64, "max_completion_length": 16, "learning_rate": 2e-6}
    if options.tiny:
        import tiny_models

        options.model = tiny_models.save("dense", f"{options.output_dir}/tiny-model")
        settings = tiny_models.settings()

    trainer = TROLLTrainer(
        model=options.model,
        reward_funcs=right_number,
        args=TROLLConfig(options.output_dir, **settings),
        train_dataset=sums(4096),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
