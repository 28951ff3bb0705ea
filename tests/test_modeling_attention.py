"""cuDNN's attention is turned off where its gradients can be NaN, and nowhere else."""

import pytest
import torch

from troll.modeling import disable_broken_cudnn_attention

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


@pytest.fixture
def machine(monkeypatch):
    """A machine with these GPUs and this cuDNN; torch's own switch, put back afterwards."""

    def make(*capabilities, cudnn=92000):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: capabilities[i])
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield make
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("capabilities", [[HOPPER], [AMPERE, HOPPER]])
def test_it_is_turned_off_on_hopper_and_said_once(machine, capabilities):
    machine(*capabilities)
    assert "cuDNN 92000" in disable_broken_cudnn_attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert disable_broken_cudnn_attention() is None


@pytest.mark.parametrize(
    ("capabilities", "cudnn"),
    [([], 92000), ([AMPERE], 92000), ([BLACKWELL], 92000), ([HOPPER], 92600), ([HOPPER], None)],
    ids=["no GPU", "Ampere", "Blackwell", "mended", "no cuDNN"],
)
def test_elsewhere_it_is_left_alone(machine, capabilities, cudnn):
    machine(*capabilities, cudnn=cudnn)
    assert disable_broken_cudnn_attention() is None
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_of_masked_attention_over_64_tokens_are_finite():
    """The case of the report: every score near −120, so that the log of their sum is below −88.7."""
    disable_broken_cudnn_attention()
    torch.manual_seed(0)
    L, D = 64, 64
    q, k, v = (torch.randn(1, 1, L, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -120 * D**0.5
    for x in (q, k, v):
        x.requires_grad_()
    mask = torch.ones(L, L, dtype=torch.bool, device="cuda").tril()[None, None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out.backward(torch.randn_like(out))
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
