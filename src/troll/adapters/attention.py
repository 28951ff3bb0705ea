"""cuDNN's attention, whose backward pass has a mistake on Hopper GPUs."""

from __future__ import annotations

import torch

_MENDED = 92600
"""cuDNN 9.26."""


def avoid_wrong_gradients() -> str | None:
    """Leave cuDNN's attention to torch's other kernels where its gradients can be NaN; what was done, in a sentence.

    With an attention mask and a length of 64, 192, 320, …, cuDNN before 9.26 can return NaN gradients of finite numbers
    on H100 and H200 (pytorch#196678). All batches of a rollout have one length, so all updates on it are lost.
    """
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    if version is None or version >= _MENDED or not _in_use():
        return None
    if all(torch.cuda.get_device_capability(i)[0] != 9 for i in range(torch.cuda.device_count())):
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    return (
        f"Attention is left to torch's other kernels: the gradients of cuDNN {version} can be NaN on this GPU, for "
        "sequences of 64, 192, 320, … tokens (pytorch#196678). torch.backends.cuda.enable_cudnn_sdp(True) after this "
        "undoes it."
    )


def _in_use() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
