"""Transport of the old policy from verl's scoring pass to its updates: one field of bytes per sequence.

A micro-batch of verl is packed: sequences one after another, T tokens in all, prompts included. Position t predicts the
token at t + 1. Only positions whose next token counts in ``loss_mask`` are recorded, as compressed sparse rows: 62
bytes with 8 kept tokens, plus one byte per sequence. verl stores the field as it stores log-probabilities, so it does
not pass through the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from troll.errors import InputError
from troll.policy import PackedPolicy, SparsePolicy

OLD_POLICY = "troll_old_policy"
_FORMAT = 1  # version of the bytes; also keeps a sequence without counted tokens from being empty


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of a micro-batch that predict the tokens of its completions."""

    counted: Tensor
    """[T] bool, positions whose next token counts."""
    sampled: Tensor
    """[T] ids of the next tokens."""
    per_sequence: list[int]
    """Number of counted positions of each sequence."""

    @classmethod
    def of(cls, data: Any) -> Positions:
        """From the jagged ``input_ids``, ``prompts`` and ``loss_mask`` (over the completions) of a micro-batch."""
        input_ids, prompts, mask = data["input_ids"], data["prompts"], data["loss_mask"]
        if not all(x.is_nested for x in (input_ids, prompts, mask)):
            raise InputError(
                "the micro-batch has padded prompts or masks, not the jagged tensors of verl's V1 trainer",
                "Set trainer.use_v1=True, the default",
            )
        ids = input_ids.values()
        ends = mask.offsets()
        lengths = ends.diff()
        first = input_ids.offsets()[:-1] + prompts.offsets().diff() - 1  # predicts the first token of the completion
        at = torch.arange(int(ends[-1]), device=ids.device) + torch.repeat_interleave(first - ends[:-1], lengths)
        asked = mask.values().bool()
        counted = torch.zeros_like(ids, dtype=torch.bool).index_put((at,), asked)
        return cls(
            counted,
            torch.roll(ids, -1),
            torch.segment_reduce(asked.float(), "sum", lengths=lengths).long().tolist(),
        )


def write(policy: SparsePolicy, positions: Positions) -> Tensor:
    """A policy over all T positions → the field, jagged [B, bytes]."""
    packed = policy[positions.counted].pack()
    ends = [0, *torch.tensor(positions.per_sequence).cumsum(0).tolist()]
    first = torch.nn.functional.pad(packed.counts.cumsum(0, dtype=torch.int64), (1, 0))[ends].tolist()
    mark = torch.full((1,), _FORMAT, dtype=torch.uint8, device=packed.counts.device)
    rows = []
    for i in range(len(positions.per_sequence)):
        here, kept = slice(ends[i], ends[i + 1]), slice(first[i], first[i + 1])
        part = PackedPolicy(
            packed.counts[here],
            packed.token_ids[kept],
            packed.log_probs[kept],
            packed.log_tail[here],
            packed.slots,
            packed.vocab_size,
            packed.temperature,
        )
        rows.append(torch.cat([mark, part.to_bytes()]))
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def read(data: Any, positions: Positions, slots: int, vocab_size: int) -> SparsePolicy:
    """The field of a micro-batch → the old policy over all T positions, masked out where they do not count.

    Args:
        data: the micro-batch.
        positions: of the same micro-batch.
        slots: K, the most tokens kept per position.
        vocab_size: V.
    """
    field = data.get(OLD_POLICY, None)
    if field is None:
        raise InputError(
            f"the batch has no field {OLD_POLICY!r}, so the old policy was not recorded when verl scored the rollout",
            "Set trainer.use_v1=True and algorithm.rollout_correction.bypass_mode=False",
        )
    rows = field.unbind()
    if any(int(row[0]) != _FORMAT for row in rows[:1]) or len(rows) != len(positions.per_sequence):
        raise InputError(
            f"the old policy has {len(rows)} sequences in format {int(rows[0][0])}, the batch has "
            f"{len(positions.per_sequence)} sequences and needs format {_FORMAT}",
            "Install the same version of troll on all machines",
        )
    packed = PackedPolicy.cat(
        [
            PackedPolicy.from_bytes(row[1:], n, slots, vocab_size)
            for row, n in zip(rows, positions.per_sequence, strict=True)
        ]
    )
    at = positions.counted.nonzero()[:, 0]
    T = len(positions.counted)
    spread = PackedPolicy(
        packed.counts.new_zeros(T).index_copy(0, at, packed.counts),
        packed.token_ids,
        packed.log_probs,
        packed.log_tail.new_zeros(T).index_copy(0, at, packed.log_tail),
        slots,
        vocab_size,
        packed.temperature,
    )
    return spread.unpack(check=False)
