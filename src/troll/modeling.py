"""Models of transformers: the dropout check, a workaround for a cuDNN bug, and faster decoding."""

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

from troll.errors import InputError

_FIXED_CUDNN = 92600
"""cuDNN 9.26."""


def check_dropout(model: torch.nn.Module, fix: str) -> None:
    """Refuse a model with dropout: scored twice, it would differ from itself, and the bound would act on noise."""
    for name, module in model.named_modules():
        names = ["p"] if isinstance(module, torch.nn.Dropout) else [key for key in vars(module) if "drop" in key]
        for key in names:
            value = getattr(module, key)
            if isinstance(value, float) and value > 0:
                raise InputError(
                    f"the model has dropout ({name}.{key}={value}), so its KL to itself would be noise: a rollout is "
                    "scored twice",
                    fix,
                )


def disable_broken_cudnn_attention() -> str | None:
    """Turn off cuDNN's attention where its gradients can be NaN; returns a sentence that says so, or None.

    With an attention mask and a length of 64, 192, 320, …, cuDNN before 9.26 can return NaN gradients of finite numbers
    on H100 and H200 (pytorch#196678). All batches of a rollout have one length, so all updates on it are lost.
    """
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    if version is None or version >= _FIXED_CUDNN or not _cudnn_attention_enabled():
        return None
    if all(torch.cuda.get_device_capability(i)[0] != 9 for i in range(torch.cuda.device_count())):
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    return (
        f"cuDNN attention is disabled: the gradients of cuDNN {version} can be NaN on this GPU for sequences of 64, "
        "192, 320, … tokens (pytorch#196678). Call torch.backends.cuda.enable_cudnn_sdp(True) afterwards to enable it "
        "again."
    )


def _cudnn_attention_enabled() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


_UNSHARDED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Where a process holds all parameters all the time. Elsewhere, cached casts would hold the whole model."""


@contextmanager
def fast_decoding(accelerator: Accelerator) -> Iterator[None]:
    """Inside, ``model.generate`` casts the parameters once and reads grouped keys without copying them.

    Without it, every token of a completion casts every fp32 parameter to bf16 again and, with grouped queries, copies
    the cache. The rounding is the same.
    """
    # An outer autocast: the cache of casts is cleared when the outermost ends, else after each forward.
    cached_casts = accelerator.autocast() if accelerator.distributed_type in _UNSHARDED else nullcontext()
    with gqa_decoding(), cached_casts:
        yield


@contextmanager
def gqa_decoding() -> Iterator[None]:
    """Inside, models with transformers' ``sdpa`` decode with ``gqa_attention``.

    With a mask, which left padding needs, transformers copies all cached keys and values once for each query of a
    group, for every token. Here the queries of a group are rows of one product, and the cache is read in place.
    """
    replaced = ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    if replaced:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = gqa_attention
    try:
        yield
    finally:
        if replaced:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]


def gqa_attention(
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
