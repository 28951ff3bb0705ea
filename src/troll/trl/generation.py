"""Generation in TRL without what is done again for every token.

A token of all completions is a forward pass of the model as it is trained: in bf16 every fp32 weight is cast again, and
with grouped queries the cache is copied (``troll.modeling``). The weights are rounded here as they are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from accelerate import Accelerator
from accelerate.utils import DistributedType

from troll.modeling import gqa_decoding

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Where a process has all weights all the time; elsewhere casts that are kept would hold the whole model."""


@contextmanager
def token_by_token(accelerator: Accelerator) -> Iterator[None]:
    """Inside, ``model.generate`` casts the weights once and reads the cache as it is."""
    # An outer autocast: casts are forgotten when the outermost ends, which is else the one around each forward.
    casts_kept = accelerator.autocast() if accelerator.distributed_type in _WHOLE else nullcontext()
    with gqa_decoding(), casts_kept:
        yield
