"""``PackedPolicy``: back and forth bit for bit, and no larger than promised."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import F32, F64, INF, by_hand, close, ids, normal, refuses, same_bits, same_policy

from troll.policy import PackedPolicy, SparsePolicy, restrict, sparsify


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.integers(0, 2**31),
    st.sampled_from([(), (1,), (5,), (2, 3), (0,), (2, 0)]),
    st.integers(1, 40),
    st.integers(1, 50),
    st.sampled_from([0.0, 1e-3, 0.3]),
    st.sampled_from([torch.bfloat16, F32, F64]),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_unpack_undoes_pack_bit_for_bit(
    seed: int, shape: tuple[int, ...], V: int, K: int, tail_mass: float, dtype: torch.dtype, masked: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) >= masked
    policy = sparsify(
        normal(*shape, V, seed=seed, scale=4.0, dtype=dtype),
        ids(*shape, below=V, seed=seed),
        K,
        tail_mass,
        temperature=0.7,
        loss_mask=mask,
    )
    packed = policy.pack()
    assert same_policy(packed.unpack(), policy)
    used = int(policy.support_size.sum())
    width = 8 if dtype == F64 else 4
    assert packed.nbytes == used * (3 + width) + mask.numel() * (2 + width)


def test_layout_by_hand() -> None:
    policy = by_hand(
        [[0x010203, 5, -1], [-1, -1, -1], [255, 256, 65536]], [[0.5, 0.25, 0.0], [0.0] * 3, [0.5, 0.25, 0.25]], 1 << 24
    )
    packed = policy.pack()
    assert packed.counts.tolist() == [2, 0, 3]
    assert packed.counts.dtype == torch.int16
    assert packed.token_ids.tolist() == [[3, 2, 1], [5, 0, 0], [255, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert packed.token_ids.dtype == torch.uint8
    assert packed.log_probs.exp().tolist() == close([0.5, 0.25, 0.5, 0.25, 0.25], rel=1e-15)
    assert packed.log_tail.exp().tolist() == close([0.25, 1.0, 0.0], rel=1e-15)
    assert (packed.slots, packed.vocab_size, packed.temperature) == (3, 1 << 24, 1.0)
    assert packed.nbytes == 5 * 3 + 5 * 8 + 3 * 2 + 3 * 8
    assert same_policy(packed.unpack(), policy)


def test_the_largest_vocabulary_fits() -> None:
    largest = (1 << 24) - 1
    policy = by_hand([[largest, 0, largest - 1]], [[0.5, 0.25, 0.25]], 1 << 24)
    assert policy.pack().unpack().token_ids.tolist() == [[largest, 0, largest - 1]]
    too_large = SparsePolicy(policy.token_ids, policy.log_probs, policy.log_tail, (1 << 24) + 1)
    with refuses("vocab_size=16777217", "2²⁴", "SparsePolicy itself"):
        too_large.pack()


def test_eight_tokens_take_at_most_64_bytes() -> None:
    """V of Qwen; eight tokens hold all but e⁻²⁰ of the mass of each row, with the sampled one among them."""
    V, N = 151_936, 12
    logits = normal(N, V, seed=80)
    top = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(row))[:8] for row in range(N)])
    logits.scatter_(-1, top, 40.0 + torch.arange(8.0).expand(N, 8) / 8)
    policy = sparsify(logits, top[:, 3])
    assert policy.support_size.tolist() == [8] * N
    assert policy.token_ids.shape == (N, 64)
    packed = policy.pack()
    assert packed.nbytes / N == 62.0 <= 64
    assert same_policy(packed.unpack(), policy)


def test_32767_slots_fit_and_no_more() -> None:
    def wide(slots: int) -> SparsePolicy:
        log_probs = torch.full((1, slots), -float(torch.tensor(float(slots), dtype=F64).log()))
        return SparsePolicy(torch.arange(slots)[None], log_probs, torch.tensor([-INF]), slots)

    packed = wide(32_767).pack()
    assert packed.counts.tolist() == [32_767]
    assert same_policy(packed.unpack(), wide(32_767))
    with refuses("got 32768", "32,767", "max_support"):
        wide(32_768).pack()


def test_gaps_in_the_support_are_refused() -> None:
    old = sparsify(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([0]), 3, 0.0)
    gap = restrict(torch.tensor([[3.0, -INF, 1.0]]), old)
    assert gap.token_ids.tolist() == [[0, -1, 2]]
    with refuses("unused slots between used ones", "at the end", "troll.sparsify"):
        gap.pack()
    end = restrict(torch.tensor([[3.0, 2.0, -INF]]), old)
    assert same_policy(end.pack().unpack(), end)


def test_packing_makes_a_constant() -> None:
    live = sparsify(normal(3, 9, seed=81).requires_grad_(), torch.tensor([0, 1, 2]), 4)
    packed = PackedPolicy.of(live)
    assert not packed.log_probs.requires_grad
    assert not packed.log_tail.requires_grad
    assert same_bits(packed.unpack().log_probs, live.log_probs.detach())
    assert not packed.unpack().log_probs.requires_grad


def test_a_damaged_pack_is_refused() -> None:
    """Bytes that do not name a policy are seen when it is unpacked."""
    packed = sparsify(normal(2, 9, seed=82), torch.tensor([0, 1]), 3, 0.0).pack()
    packed.token_ids[1] = packed.token_ids[0]
    with refuses("position [0]", "at most once"):
        packed.unpack()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from([0.0, 0.5, 1.0]))
def test_bytes_of_sequences_give_the_policy_back(seed: int, lengths: list[int], masked: float) -> None:
    """Each sequence to bytes and back, then one after another; also where a sequence or a position is empty."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    mask = torch.rand(n, generator=generator) >= masked
    policy = sparsify(
        normal(n, 30, seed=seed, scale=4.0), ids(n, below=30, seed=seed), 8, 1e-2, temperature=0.7, loss_mask=mask
    )
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    rows = [policy[slice(a, b)].pack().to_bytes() for a, b in pairwise(ends)]
    for row, length, (a, b) in zip(rows, lengths, pairwise(ends), strict=True):
        assert len(row) == 6 * length + 7 * int(policy[slice(a, b)].support_size.sum())
    parts = [PackedPolicy.from_bytes(row, m, 8, 30, 0.7) for row, m in zip(rows, lengths, strict=True)]
    assert same_policy(PackedPolicy.cat(parts).unpack(), policy)


def test_bytes_may_lie_anywhere() -> None:
    """In one tensor with others, at an odd address."""
    policy = sparsify(normal(5, 30, seed=1, scale=4.0), ids(5, below=30, seed=1), 8, 1e-2)
    row = torch.cat([torch.zeros(1, dtype=torch.uint8), policy.pack().to_bytes()])[1:]
    assert same_policy(PackedPolicy.from_bytes(row, 5, 8, 30).unpack(), policy)


def test_bytes_that_cannot_be_are_refused() -> None:
    policy = sparsify(normal(5, 30, seed=1), ids(5, below=30, seed=1), 8)
    row = policy.pack().to_bytes()
    for data, positions in ((row[:-1], 5), (row, 4), (row[:20], 5), (row.int(), 5)):
        with refuses(
            "uint8" if data.dtype != torch.uint8 else f"{len(data)} bytes and cannot be a policy over {positions}"
        ):
            PackedPolicy.from_bytes(data, positions, 8, 30)
    with refuses("[2, 5]", hint="one sequence at a time"):
        sparsify(normal(2, 5, 30, seed=1), ids(2, 5, below=30, seed=1), 8).pack().to_bytes()
    with refuses("float64"):
        sparsify(normal(5, 30, seed=1, dtype=F64), ids(5, below=30, seed=1), 8).pack().to_bytes()


def test_policies_of_different_models_are_not_brought_together() -> None:
    one, other = (sparsify(normal(2, V, seed=1), ids(2, below=9, seed=1), 4).pack() for V in (10, 11))
    with refuses("the same vocab_size and the same temperature"):
        PackedPolicy.cat([one, other])


def test_the_widest_policy_sets_the_slots() -> None:
    narrow, wide = (sparsify(normal(2, 20, seed=1), ids(2, below=20, seed=1), K, 0.0) for K in (3, 7))
    both = PackedPolicy.cat([narrow.pack(), wide.pack()]).unpack()
    assert torch.equal(both.token_ids[:2, :3], narrow.token_ids)
    assert torch.equal(both.token_ids[2:], wide.token_ids)
    assert (both.token_ids[:2, 3:] == -1).all()
