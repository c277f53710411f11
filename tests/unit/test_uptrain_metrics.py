"""The share of a device's peak that training reaches: the peak by the device's name, and the operations of a token."""

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode

from headpool.uptrain.metrics import flops_per_token, peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla T4", 65),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(name: str, teraflops: int | None) -> None:
    """As torch.cuda.get_device_name gives names; dense, in 16 bits."""
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)


def test_the_operations_of_a_token_are_those_that_pytorch_counts() -> None:
    built = tiny.model("llama", head_dim=8)
    built.set_attn_implementation("eager")
    tokens, sequence = 2 * 64, 64
    with FlopCounterMode(display=False) as counter:
        logits = built(torch.ones(2, sequence, dtype=torch.long), use_cache=False).logits
        logits.sum().backward()
    multiplied = sum(one.numel() for one in built.parameters()) - built.get_input_embeddings().weight.numel()
    square = flops_per_token(
        multiplied, 2, 2 * 12 * 8, sequence
    )  # eager attention multiplies what causality hides, too
    assert counter.get_total_flops() / tokens == pytest.approx(square, rel=0.01)
    causal = flops_per_token(multiplied, 2, 12 * 8, sequence)
    assert square - causal == 6 * 2 * 12 * 8 * sequence
