"""Where there is no GPU, Triton kernels are interpreted: to be said before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
