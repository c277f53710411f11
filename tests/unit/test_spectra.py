"""Eigendecompositions with fixed signs and floors: against their definitions."""

import heads
import pytest
import torch
from torch import Tensor

from headpool.convert.aligned.spectra import FLOOR, blocks, lost_energy, principal, roots, stack, weigh


def hermitian(seed: int, size: int) -> Tensor:
    x = torch.complex(heads.normal(seed, 5, size, 3 * size), heads.normal(seed + 1, 5, size, 3 * size))
    return x @ x.mH


def test_principal_vectors_have_one_phase() -> None:
    matrix = hermitian(0, 4)
    values, vectors = principal(matrix, 2)
    torch.testing.assert_close(matrix @ vectors, vectors * values[:, None].to(vectors.dtype), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(vectors.mH @ vectors, torch.eye(2, dtype=vectors.dtype).expand(5, 2, 2))
    assert (values[:, 0] >= values[:, 1]).all()
    every = torch.linalg.eigvalsh(matrix)
    torch.testing.assert_close(values, every[:, [3, 2]])
    torch.testing.assert_close(lost_energy(matrix, 2), every[:, :2].sum(1))
    for vector in vectors.mT.flatten(0, 1):
        largest = vector[vector.abs().argmax()]
        assert largest.real > 0
        assert abs(largest.imag) < 1e-15


def test_roots_square_to_their_matrix_above_the_floor() -> None:
    x = heads.normal(0, 3, 4, 2) * torch.tensor([1.0, 10.0, 0.0])[:, None, None]
    matrix = x @ x.mT  # of rank 2, 2 and 0
    root, inverse = roots(matrix)
    torch.testing.assert_close(root @ inverse, torch.eye(4, dtype=torch.float64).expand(3, 4, 4), rtol=0, atol=1e-9)
    largest = torch.linalg.eigvalsh(matrix).max()
    torch.testing.assert_close(root @ root, matrix, rtol=0, atol=float(largest) * FLOOR * 1.01)
    torch.testing.assert_close(root[2], torch.eye(4, dtype=torch.float64) * (FLOOR * largest).sqrt())
    for unit in roots(torch.zeros(2, 3, 3, dtype=torch.float64)):
        assert torch.equal(unit, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))


@pytest.mark.parametrize("size", [1, 3])
def test_stacked_heads_and_their_blocks(size: int) -> None:
    x = heads.normal(0, 10, 4 * size)
    cut = blocks(x.T @ x, 4)
    for j in range(4):
        for l in range(4):
            one, other = x[:, j * size : (j + 1) * size], x[:, l * size : (l + 1) * size]
            torch.testing.assert_close(cut[j, l], one.T @ other)
    assert torch.equal(stack(cut), x.T @ x)
    root = heads.normal(1, 4, size, size)
    root = root + root.mT
    whole = torch.block_diag(*root)
    torch.testing.assert_close(weigh(x.T @ x, root), whole @ x.T @ x @ whole)
