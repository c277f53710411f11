"""Values in another dtype, rounded exactly once."""

import torch
from torch import Tensor


def round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, each rounded to nearest even exactly once.

    PyTorch takes float64 to bfloat16 and float16 by way of float32, and two roundings can miss the nearest value. Here
    the step in between rounds to odd (Boldo and Melquiond 2008): inexact values get an odd last bit, so that the
    second rounding still sees on which side of a tie they lay.
    """
    if values.dtype != torch.float64 or dtype not in (torch.bfloat16, torch.float16):
        return values.to(dtype)
    nearest = values.float()
    missed = values - nearest
    bits = nearest.view(torch.int32)
    bits -= (missed * values < 0).int()
    bits |= (missed.abs() > 0).int()  # false for infinities, whose difference is NaN
    return nearest.to(dtype)
