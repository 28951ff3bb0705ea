"""Every kind of model trains with the bound active, and the bound holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from datasets import Dataset
from PIL import Image
from trl_cases import furthest, logged, trainer, weights

TAILS = ["bucket", "floor"]
SIZES = [(28, 28), (56, 28), (28, 56), (56, 56)]  # 1, 2, 2 and 4 tokens: a prompt's share of the pixels is its own


def pictures(n: int = 64) -> Dataset:
    """Conversations that begin with an image, all of another colour."""
    colours = [(37 * i % 256, 91 * i % 256, 53 * i % 256) for i in range(n)]
    images = [Image.new("RGB", SIZES[i % 4], colour) for i, colour in enumerate(colours)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"say {i}"}] for i in range(n)], "image": images})


def start(folder: Path, kind: str, **changes: Any) -> Any:
    return trainer(folder, kind, **{**({"train_dataset": pictures()} if kind == "vision" else {}), **changes})


def one_batch(run: Any) -> tuple[Any, dict[str, Any]]:
    """The model in training mode and the first batch of a rollout, as an update on it would find them."""
    run.model.train()
    run.current_gradient_accumulation_steps = 1
    return run.model, run._prepare_inputs(next(iter(run.get_train_dataloader())))


def gradients(run: Any, loss: torch.Tensor, part: str) -> dict[str, torch.Tensor]:
    chosen = {name: p for name, p in run.model.named_parameters() if part in name}
    return dict(zip(chosen, torch.autograd.grad(loss, list(chosen.values())), strict=True))


def distance(run: Any, model: Any, batch: dict[str, Any]) -> float:
    """Largest KL of a token to the old policy, before the projection."""
    run._metrics["train"].clear()
    run._compute_loss(model, batch)
    return run._metrics["train"]["troll/kl_before/max"][-1]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", ["dense", "moe", "vision"])
def test_the_bound_acts_and_holds(tmp_path: Path, kind: str, tail: str) -> None:
    run = start(tmp_path, kind, tail=tail)
    before = weights(run)
    run.train()
    after = weights(run)
    assert all((after[name] != before[name]).any() for name in before)  # the gradient reaches every part of the model
    assert furthest(before, after) > 1e-2
    assert len(logged(run, "troll/kl_before/max")) == 4
    assert logged(run, "troll/kl_before/max")[0] < 1e-9  # the first update is made by the old policy itself
    assert min(logged(run, "troll/projected_fraction")[1:]) > 0.5
    assert min(logged(run, "troll/kl_before/max")[1:]) > 0.1
    assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


@pytest.mark.parametrize("tail", TAILS)
def test_the_loss_of_experts_has_their_load_balancing_in_it(tmp_path: Path, tail: str) -> None:
    run = start(tmp_path, "moe", tail=tail)
    assert run.router_aux_loss_coef == 0.01  # that of the model's configuration
    model, batch = one_batch(run)
    loss = run._compute_loss(model, batch)
    run.router_aux_loss_coef = 0.0
    without = run._compute_loss(model, batch)
    # transformers' own forward, which knows neither TRL's head nor ours, on the same sequences
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    load = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    assert run._metrics["train"]["aux_loss"] == [pytest.approx(load.item(), rel=1e-6)] * 2
    # Differences of losses of about 0.1 in fp32, eps 1e-7, here of 0.02.
    assert loss.item() - without.item() == pytest.approx(0.01 * load.item(), rel=1e-5)
    balance, policy, both = (gradients(run, x, "mlp.gate.") for x in (load, without, loss))
    assert balance
    for name in balance:
        # What balances the load is small next to what the rewards ask for; both reach the router, and add up.
        assert balance[name].abs().max() > 1e-3
        assert policy[name].abs().max() > 1e-3
        torch.testing.assert_close(both[name] - policy[name], 0.01 * balance[name], rtol=1e-4, atol=1e-7)


def test_the_load_of_the_experts_is_logged_with_every_update(tmp_path: Path) -> None:
    run = start(tmp_path, "moe")
    run.train()
    values = logged(run, "aux_loss")
    # Two experts of four per token: 2 when they are used alike, at most 4 when it is always the same two. The first two
    # updates see the same router on other sequences, so that a constant would stand out.
    assert len(values) == 4
    assert all(2 <= x < 4 for x in values)
    assert len(set(values)) == 4


def test_without_a_coefficient_there_is_no_load_balancing(tmp_path: Path) -> None:
    run = start(tmp_path, "moe", router_aux_loss_coef=0.0)
    run.train()
    assert logged(run, "aux_loss") == []
    assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


@pytest.mark.parametrize("tail", TAILS)
def test_both_policies_see_the_image(tmp_path: Path, tail: str) -> None:
    run = start(tmp_path, "vision", tail=tail)
    model, batch = one_batch(run)
    assert len(set(batch["image_grid_thw"].prod(-1).tolist())) > 1  # the images of this batch differ in size
    # One policy with the image and one without would be apart here, ...
    assert distance(run, model, batch) < 1e-9
    # ... and if neither saw it, nothing would change here.
    other = {**batch, "pixel_values": batch["pixel_values"].flip(-1)}
    assert distance(run, model, other) > 1e-3


def test_every_sequence_has_its_own_image(tmp_path: Path) -> None:
    run = start(tmp_path, "vision")
    model, batch = one_batch(run)
    rows = batch["image_grid_thw"].prod(-1).tolist()
    pixels = batch["pixel_values"].clone()
    pixels[: rows[0]] = pixels[: rows[0]].flip(-1)  # those of the first sequence
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    images = {name: batch[name] for name in ("image_grid_thw", "num_images", "mm_token_type_ids")}
    keep = batch["completion_ids"].shape[1]
    was, now = (
        run._get_per_token_logps_and_entropies(model, ids, mask, keep, pixel_values=x, **images)[0].detach()
        for x in (batch["pixel_values"], pixels)
    )
    assert (was - now)[0].abs().max() > 1e-3
    # The others share the forward with it, no more: what it computes for them is the same numbers.
    assert (was - now)[1:].abs().max() < 1e-6


def test_a_vision_model_trains_on_text_alone(tmp_path: Path) -> None:
    texts = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"say {i}"}] for i in range(64)]})
    run = start(tmp_path, "vision", train_dataset=texts)
    before = weights(run)
    run.train()
    after = weights(run)
    moved = {name for name in before if (after[name] != before[name]).any()}
    assert moved == {name for name in before if ".visual." not in name}
    assert logged(run, "troll/kl_before/max")[0] < 1e-9
    assert min(logged(run, "troll/projected_fraction")[1:]) > 0.5
    assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


def test_a_model_read_from_a_folder_is_the_one_handed_over(tmp_path: Path) -> None:
    results = []
    for changes in ({}, {"model": tiny_models.save("dense", tmp_path / "model"), "processing_class": None}):
        run = trainer(tmp_path / "out", **changes)
        run.train()
        results.append(weights(run))
    assert furthest(*results) == 0
