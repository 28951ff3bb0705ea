"""Kernels, losses and packed bytes give the bits they gave when ``tests/stored/bits.npz`` was written.

Code may be moved and rewritten; the numbers of the method may not. ``python tests/test_same_bits.py`` writes the file
again, which only a deliberate change of the numerics justifies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
from torch import Tensor

import troll
from troll.objective import constrain

STORED = Path(__file__).parent / "stored" / "bits.npz"
IMPLS = ("reference", "torch", "triton")
B, T, V, H = 3, 4, 97, 16

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stored bits are those of a CPU"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy, in Triton's interpreter
]


def numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers from numpy, whose streams do not change from version to version."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).normal(size=shape) * scale).float()


def batch() -> dict[str, Tensor]:
    """Old and new hidden states [B, T, H], a head [V, H], sampled tokens, advantages and a mask."""
    draw = np.random.Generator(np.random.PCG64(5))
    hidden = numbers(B, T, H, seed=1)
    return {
        "old_hidden": hidden,
        "hidden": hidden + numbers(B, T, H, seed=2, scale=0.3),
        "weight": numbers(V, H, seed=3),
        "sampled": torch.from_numpy(draw.integers(0, V, (B, T))),
        "advantages": numbers(B, seed=4),
        "mask": torch.from_numpy(draw.random((B, T)) < 0.8),
    }


def policies(tail: str, impl: Any, given: dict[str, Tensor], leaf: Tensor) -> tuple[Any, Any]:
    old = troll.sparsify(given["old_hidden"] @ given["weight"].T, given["sampled"], 12, 1e-3, impl=impl)
    if tail == "bucket":
        return troll.restrict(leaf, old, impl=impl), old
    return troll.sparsify(leaf, given["sampled"], 12, 1e-3, impl=impl), old


def of_policy(policy: Any) -> dict[str, Tensor]:
    return {
        "ids": policy.token_ids,
        "log_probs": policy.log_probs.detach(),
        "log_tail": policy.log_tail.detach(),
        "bytes": torch.cat([part.to_bytes() for part in policy.detach().pack().sequences()]),
    }


def selection(impl: Any) -> dict[str, Tensor]:
    given = batch()
    logits = (given["hidden"] @ given["weight"].T).requires_grad_()
    policy = troll.sparsify(logits, given["sampled"], 12, 1e-3, temperature=0.7, impl=impl)
    (policy.log_probs.clamp(min=-50).sum() + policy.log_tail.sum()).backward()
    return {**of_policy(policy), "grad": logits.grad}


def losses(tail: str, level: str, impl: Any) -> dict[str, Tensor]:
    given = batch()
    leaf = (given["hidden"] @ given["weight"].T).requires_grad_()
    proposal, old = policies(tail, impl, given, leaf)
    chosen = {"kl_bound": 0.05, "tail": tail, "importance_sampling_level": level, "impl": impl}
    loss, metrics = troll.troll_loss(proposal, old, given["advantages"], given["mask"], **chosen)
    loss.backward()
    return {"loss": loss.detach(), "grad": leaf.grad, **{f"metric/{k}": v for k, v in sorted(metrics.items())}}


def constrained(tail: str, impl: Any) -> dict[str, Tensor]:
    given = batch()
    leaf = (given["hidden"] @ given["weight"].T).requires_grad_()
    step = constrain(*policies(tail, impl, given, leaf), 0.05, tail=tail, impl=impl)
    (step.log_ratio.sum() + step.regression.sum()).backward()
    found = {"log_ratio": step.log_ratio.detach(), "regression": step.regression.detach(), "grad": leaf.grad}
    return found | {name: getattr(step.projection, name) for name in ("mix", "kl_before", "kl_after", "iterations")}


def projection(solver: Any, impl: Any) -> dict[str, Tensor]:
    old = numbers(40, 9, seed=6, scale=3.0).log_softmax(-1)
    proposal = (old + numbers(40, 9, seed=7, scale=2.0)).log_softmax(-1).requires_grad_()
    result = troll.project(proposal, old, 0.05, solver=solver, impl=impl)
    result.log_probs.clamp(min=-50).pow(2).sum().backward()
    found = {"log_probs": result.log_probs.detach(), "grad": proposal.grad}
    return found | {name: getattr(result, name) for name in ("mix", "eta", "kl_before", "kl_after", "iterations")}


def fused(tail: str, impl: Any) -> dict[str, Tensor]:
    given = batch()
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"].clone().requires_grad_()
    head = troll.Head(weight, impl=impl)
    with torch.no_grad():
        old, entropy = head.sparsify(given["old_hidden"], given["sampled"], 12, 1e-3)
    chosen = {"kl_bound": 0.05, "tail": tail}
    loss, _ = troll.fused_troll_loss(hidden, head, old, given["advantages"], given["mask"], **chosen)
    loss.backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "entropy": entropy, **of_policy(old)}


def clipping(level: str) -> dict[str, Tensor]:
    given = batch()
    leaf = (given["hidden"] @ given["weight"].T).requires_grad_()
    pair = policies("floor", "reference", given, leaf)
    chosen = {"tail": "floor", "importance_sampling_level": level, "impl": "reference"}
    loss, _ = troll.clip_loss(*pair, given["advantages"], given["mask"], **chosen)
    loss.backward()
    return {"loss": loss.detach(), "grad": leaf.grad}


CASES: dict[str, Callable[[], dict[str, Tensor]]] = {
    **{f"selection-{i}": (lambda i=i: selection(i)) for i in IMPLS},
    **{
        f"loss-{t}-{r}-{i}": (lambda t=t, r=r, i=i: losses(t, r, i))
        for t in ("floor", "bucket")
        for r in ("token", "sequence")
        for i in IMPLS
    },
    **{f"constrain-{t}-{i}": (lambda t=t, i=i: constrained(t, i)) for t in ("floor", "bucket") for i in IMPLS},
    **{
        f"project-{s}-{i}": (lambda s=s, i=i: projection(s, i))
        for s, i in (("newton", "reference"), ("newton", "triton"), ("bracketing", "reference"))
    },
    **{f"fused-{t}-{i}": (lambda t=t, i=i: fused(t, i)) for t in ("floor", "bucket") for i in IMPLS},
    **{f"clip-{r}": (lambda r=r: clipping(r)) for r in ("token", "sequence")},
}


def machine() -> dict[str, Tensor]:
    """What this processor and these libraries make of exp, log and products: where they differ, so may last bits."""
    x, y = numbers(7, 33, seed=8), numbers(33, 5, seed=9)
    one = x.abs() + 1e-3
    return {
        "exp": x.exp(),
        "log": one.log(),
        "softmax": x.log_softmax(-1),
        "product": x @ y,
        "double": x.double().exp().log_softmax(-1),
        "numpy": torch.from_numpy(np.exp2(x.numpy())),
        "numpy_log": torch.from_numpy(np.log(one.numpy())),
    }


@cache
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED) as file:
        return dict(file)


def of(case: str) -> dict[str, np.ndarray]:
    prefix = f"{case}:"
    return {name.removeprefix(prefix): x for name, x in stored().items() if name.startswith(prefix)}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@cache
def same_machine() -> bool:
    return all(same_bits(x.numpy(), of("machine")[name]) for name, x in machine().items())


@pytest.mark.parametrize("case", CASES)
def test_of(case: str) -> None:
    then, now = of(case), {name: x.numpy() for name, x in CASES[case]().items()}
    assert then, f"no stored bits for {case}"
    missing = {name for name in then if name not in now}
    assert not missing
    for name, x in then.items():
        if same_machine():
            assert same_bits(now[name], x), f"{name} of {case} has other bits"
        else:  # another processor rounds exp and log otherwise: 4 units in the last place of the largest number
            np.testing.assert_allclose(now[name], x, rtol=5e-6, atol=5e-7, err_msg=f"{name} of {case}")


if __name__ == "__main__":
    made = {f"{case}:{name}": x.numpy() for case, make in CASES.items() for name, x in make().items()}
    made |= {f"machine:{name}": x.numpy() for name, x in machine().items()}
    np.savez_compressed(STORED, **made)
    print(f"{len(made)} arrays, {STORED.stat().st_size:,} bytes")
