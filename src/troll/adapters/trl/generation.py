"""Generation without what transformers does again for every token.

In TRL a token of all completions is a forward pass of the model as it is trained: in bf16 training every fp32 weight is
cast again, and with grouped queries all cached keys and values are copied once for each query of a group. Both cost
more memory traffic than the pass itself. Nothing else changes: the same weights, rounded in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Where a process has all weights all the time; elsewhere casts that are kept would hold the whole model."""


@contextmanager
def token_by_token(accelerator: Accelerator) -> Iterator[None]:
    """Inside, ``model.generate`` casts the weights once and reads the cache as it is."""
    replaced = ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    if replaced:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention
    try:
        # An outer autocast: casts are forgotten when the outermost ends, which is else the one around each forward.
        with accelerator.autocast() if accelerator.distributed_type in _WHOLE else nullcontext():
            yield
    finally:
        if replaced:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """transformers' attention; for a single token, queries that share keys are rows of one product.

    query: [sequences, heads, 1, d]; key, value: [sequences, groups, length, d] → [sequences, 1, heads, d].
    """
    sequences, heads, tokens, _ = query.shape
    groups = key.shape[1]
    one_mask = attention_mask is None or attention_mask.shape[1] == 1  # the same for all heads
    plain = one_mask and not named.get("dropout") and named.get("position_bias") is None
    if tokens > 1 or groups == heads or heads % groups or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    rows = query.reshape(sequences, groups, heads // groups, -1)
    result = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=named.get("scaling"))
    return result.reshape(sequences, 1, heads, -1), None
