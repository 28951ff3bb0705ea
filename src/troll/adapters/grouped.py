"""Attention of one new token whose queries share keys and values in groups.

With a mask, which left padding needs, transformers copies all cached keys and values once for each query of a group,
for every token. Here the queries of a group are rows of one product, and the cache is read as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@contextmanager
def grouped_queries() -> Iterator[None]:
    """Inside, models with transformers' ``sdpa`` have ``grouped_attention``."""
    replaced = ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    if replaced:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention
    try:
        yield
    finally:
        if replaced:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """transformers' attention, with the same result.

    query: [sequences, heads, 1, d]; key, value: [sequences, groups, length, d] → [sequences, 1, heads, d].
    """
    sequences, heads, tokens, _ = query.shape
    groups = key.shape[1]
    one_mask = attention_mask is None or attention_mask.shape[1] == 1  # the same for all heads
    plain = one_mask and not named.get("dropout") and named.get("position_bias") is None
    if tokens > 1 or groups == heads or not plain:
        theirs: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
        return theirs
    rows = query.reshape(sequences, groups, heads // groups, -1)
    result = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=named.get("scaling"))
    return result.reshape(sequences, 1, heads, -1), None
