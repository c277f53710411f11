"""Tensors of a checkpoint as PyTorch's."""

import os

import torch
from torch import Tensor

from headpool.errors import RequestError
from headpool.headers import TORCH_DTYPES, TensorRecord

TORCH = {held: getattr(torch, name) for name, held in TORCH_DTYPES.items() if hasattr(torch, name)}
"""PyTorch's dtypes by safetensors' words for them."""


def read_tensor(record: TensorRecord) -> Tensor:
    """A tensor of a checkpoint in memory of its own, in the file's dtype.

    Raises RequestError when the file has become too short for that.
    """
    data = bytearray(record.nbytes)
    view = memoryview(data)
    with record.path.open("rb", buffering=0) as stream:
        stream.seek(record.offset)
        while view:
            count = stream.readinto(view)
            if not count:
                raise RequestError(f"{record.path.name} became shorter while it was read")
            view = view[count:]
        if hasattr(os, "posix_fadvise"):  # a large model's weights would push everything else out of the page cache
            os.posix_fadvise(stream.fileno(), record.offset, record.nbytes, os.POSIX_FADV_DONTNEED)
    dtype = TORCH[record.dtype]
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(record.shape)
