"""Sampling and judging held-out problems: a tiny model whose next tokens are known."""

from __future__ import annotations

import math

import pytest
import tiny_models
import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention

from troll import modeling as grouped
from troll.errors import InputError
from troll.lab.runs.statistics import majority, over_problems
from troll.lab.tasks import load_task
from troll.lab.tasks.task import Task, first_line
from troll.lab.training.evaluate import Sampling, Scores, difference, evaluate, stop_token


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    model, tokenizer = tiny_models.build("dense")
    return model.eval(), tokenizer


def task(reward, prompts=("1 =", "22 =", "333 ="), stop=None, answer_of=first_line, **columns) -> Task:
    rows = [{"prompt": p, **{k: v[i] for k, v in columns.items()}} for i, p in enumerate(prompts)]
    data = Dataset.from_list(rows)
    rewards = reward if isinstance(reward, list) else [reward]
    return Task("t", "d", data, data, rewards, answer_of, stop)


def run(tiny, of: Task, samples=4, length=3, advance=lambda _: None, **more) -> Scores:
    how = Sampling(samples=samples, max_completion_length=length, **more)
    return evaluate(*tiny, of, of.eval_dataset, how, advance)


def recorder():
    """A reward that keeps what it was given; half of the completions are right."""
    seen: list[dict] = []

    def reward(completions, **given):
        seen.append({"completions": completions, **given})
        return [float(len(x) % 2) if isinstance(x, str) else 1.0 for x in completions]

    return seen, reward


def test_every_problem_gets_its_samples_and_its_columns(tiny):
    seen, reward = recorder()
    advanced: list[int] = []
    scores = run(tiny, task(reward, answer=["1", "22", "333"]), batch_size=5, advance=advanced.append)
    assert advanced == [5, 5, 2]
    prompts = [x for call in seen for x in call["prompts"]]
    assert prompts == ["1 ="] * 4 + ["22 ="] * 4 + ["333 ="] * 4
    assert [x for call in seen for x in call["answer"]] == ["1"] * 4 + ["22"] * 4 + ["333"] * 4
    completions = [x for call in seen for x in call["completions"]]
    assert [x for row in scores.right for x in row] == [len(x) % 2 == 1 for x in completions]
    assert [x for row in scores.answers for x in row] == [first_line(x) for x in completions]
    assert [len(row) for row in scores.right] == [4, 4, 4]
    assert all(len(ids) <= 3 for call in seen for ids in call["completion_ids"])
    assert len(set(completions)) > 3


def test_the_seed_decides(tiny):
    _, reward = recorder()
    one, same, other = (run(tiny, task(reward), samples=8, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.answers != other.answers


def test_samples_follow_the_distribution_of_the_model(tiny):
    """Of one token, at a temperature: frequencies against the softmax of the logits, padding or none."""
    model, tokenizer = tiny
    seen: list[list[int]] = []

    def reward(completion_ids, **_):
        seen.extend(completion_ids)
        return [0.0] * len(completion_ids)

    run(tiny, task(reward, prompts=("7 =", "a much longer prompt =")), 2000, 1, batch_size=4000, temperature=0.5)
    for prompt, drawn in (("7 =", seen[:2000]), ("a much longer prompt =", seen[2000:])):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            p = (model(ids).logits[0, -1] / 0.5).softmax(-1)
        counts = torch.bincount(torch.tensor(drawn)[:, 0], minlength=len(p)) / 2000
        for token in p.topk(5).indices.tolist():
            assert counts[token] == pytest.approx(p[token].item(), abs=4.5 * math.sqrt(p[token] / 2000))


def test_temperature_zero_is_the_likeliest_token(tiny):
    model, tokenizer = tiny
    seen, reward = recorder()
    run(tiny, task(reward), samples=1, length=2, temperature=0)
    for prompt, (first, second) in zip(seen[0]["prompts"], seen[0]["completion_ids"], strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert model(ids).logits[0, -1].argmax() == first
            extended = torch.cat([ids, torch.tensor([[first]])], dim=1)
            assert model(extended).logits[0, -1].argmax() == second


def test_the_cache_is_not_copied(tiny, monkeypatch):
    """All tokens but the first of a completion, in both layers, have the queries of a group as rows."""
    rows = []

    def attend(query, *rest, **named):
        rows.append(query.shape[2])
        return scaled_dot_product_attention(query, *rest, **named)

    monkeypatch.setattr(grouped, "scaled_dot_product_attention", attend)
    model = tiny[0].config
    run(tiny, task(lambda completions, **_: [0.0] * len(completions)), samples=1, length=4)
    assert len(rows) == 3 * model.num_hidden_layers
    assert set(rows) == {model.num_attention_heads // model.num_key_value_heads}


def test_a_completion_ends_at_the_stop_string_and_at_the_end_token(tiny):
    model, tokenizer = tiny
    ends = {tokenizer.eos_token_id, tokenizer.encode("\n")[0]}
    lengths: dict[str | None, list[int]] = {}
    for stop in ("\n", None):
        seen, reward = recorder()
        run(tiny, task(reward, stop=stop), samples=300, length=40, batch_size=900)
        ids = seen[0]["completion_ids"]
        stops = ends if stop else {tokenizer.eos_token_id}
        assert all(not stops & set(x[:-1]) for x in ids)
        assert all(len(x) == 40 or x[-1] in stops for x in ids)
        lengths[stop] = [len(x) for x in ids]
    assert sum(lengths["\n"]) < sum(lengths[None])
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id  # left as it was


def test_a_stop_string_of_two_tokens(tiny):
    assert stop_token("\n", tiny[1]) == tiny[1].encode("\n")[0]
    _, reward = recorder()
    with pytest.raises(InputError, match=r"'ab', which must be one token of the model but is 2"):
        run(tiny, task(reward, stop="ab"))


def test_chat_prompts_and_completions(tiny):
    seen, reward = recorder()
    chat = [{"role": "user", "content": "hi"}]
    of = task(reward, prompts=(chat, chat), answer_of=lambda text: f"<{text}>")
    scores = run(tiny, of, samples=2)
    assert all(x[0]["role"] == "assistant" for x in seen[0]["completions"])
    assert scores.answers[0][0] == f"<{seen[0]['completions'][0][0]['content']}>"
    plain = tiny_models.tokenizer()
    plain.chat_template = None
    with pytest.raises(InputError, match="the model has no chat template"):
        run((tiny[0], plain), of)


def test_which_reward_decides(tiny):
    def none(completions, **_):
        return [None] * len(completions)

    def nearly(completions, **_):
        return [1 - 1e-7, 0.99, 1.0, 0.0][: len(completions)]

    async def one(completions, **_):
        return [1.0] * len(completions)

    def judged(*rewards):
        return run(tiny, task(list(rewards), prompts=("1 =",))).right[0]

    assert judged(nearly) == [True, False, True, False]
    assert judged(none, nearly) == [True, False, True, False]
    assert judged(nearly, one) == [True, False, True, False]  # the first decides
    assert judged(one, nearly) == [True] * 4
    assert judged(none) == [False] * 4


@pytest.mark.parametrize("value", [-1.0, 1.5, 10.0])
def test_rewards_that_are_not_between_0_and_1(tiny, value):
    with pytest.raises(InputError, match=rf"rewards from 0 \(wrong\) to 1 \(right\), got {value:g}"):
        run(tiny, task(lambda completions, **_: [value] * len(completions)))


def test_a_reward_that_fails_is_named(tiny):
    def broken(completions, **_):
        raise KeyError("x")

    with pytest.raises(InputError, match="the reward function 'broken' raised KeyError"):
        run(tiny, task(broken))


SCORES = Scores(
    right=[[True, True, False, False], [False] * 4, [True] * 4],
    answers=[["4", "4", "5", "5"], [None] * 4, ["1"] * 4],
    difficulty=[1.0, 2.0, 1.0],
)


def test_the_summary():
    assert SCORES.by_problem("pass@1") == [0.5, 0.0, 1.0]
    assert SCORES.by_problem("pass@2") == [pytest.approx(5 / 6), 0.0, 1.0]
    assert SCORES.by_problem("majority") == [majority(*x) for x in zip(SCORES.answers, SCORES.right, strict=True)]
    found = SCORES.summary(["pass@1", "pass@2", "majority"])
    expected = over_problems([0.5, 0.0, 1.0])
    assert found["pass@1"] == {"value": 0.5, "low": expected.low, "high": expected.high}
    assert found["majority"]["value"] == 0.5
    assert list(found["by_difficulty"]) == ["1", "2"]
    assert (found["by_difficulty"]["1"]["value"], found["by_difficulty"]["1"]["problems"]) == (0.75, 2)
    assert "by_difficulty" not in Scores(SCORES.right, SCORES.answers).summary(["pass@1"])


def test_many_difficulties_become_a_few_groups():
    n = 60
    scores = Scores([[i < 30] for i in range(n)], [["x"]] * n, [float(i) for i in range(n)])
    groups = scores.summary(["pass@1"])["by_difficulty"]
    assert [x["problems"] for x in groups.values()] == [10] * 6
    assert list(groups)[:2] == ["0 to 9", "10 to 19"]
    assert [x["value"] for x in groups.values()] == [1, 1, 1, 0, 0, 0]


def test_differences_are_problem_by_problem():
    def scores(shares):
        return Scores([[i < share for i in range(10)] for share in shares], [["x"] * 10] * len(shares))

    shares = [i % 9 for i in range(90)]
    found = difference(scores([x + 1 for x in shares]), scores(shares), "pass@1")
    assert found.mean == pytest.approx(0.1)
    assert (found.low, found.high) == (pytest.approx(0.1), pytest.approx(0.1))  # unpaired it would span 0
    backwards = difference(scores(shares), scores([x + 1 for x in shares]), "pass@1")
    assert backwards.mean == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_completion_length": -1}, "max_completion_length must be at least 1, got -1"),
        ({"temperature": -1.0}, "temperature must be ≥ 0, got -1"),
        ({"temperature": math.nan}, "temperature must be ≥ 0, got nan"),
        ({"temperature": 0.0}, "all 8 samples of a problem are the same"),
    ],
)
def test_samplings_that_cannot_be(given, said):
    with pytest.raises(InputError, match=said):
        Sampling(**given)


def test_the_arithmetic_task(tiny):
    scores = run(tiny, load_task("arithmetic", eval_size=5), samples=2, length=6)
    assert len(scores.right) == 5
    assert scores.difficulty is not None
    assert set(scores.difficulty) <= {1.0, 2.0}
