"""Brute force for closed forms: L-BFGS from random starts on the errors that they claim to minimise."""

import heads
import torch
from torch import Tensor


def minimised(error: torch.nn.Module, starts: int = 6) -> float:
    """The least value that L-BFGS finds from random starts."""
    parameters = list(error.parameters())
    found = []
    for start in range(starts):
        with torch.no_grad():
            for number, parameter in enumerate(parameters):
                parameter.copy_(heads.normal(10 * start + number, *parameter.shape))
        optimizer = torch.optim.LBFGS(
            parameters, max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )
        optimizer.step(lambda: differentiated(error))
        found.append(error().item())
    return min(found)


def differentiated(error: torch.nn.Module) -> float:
    error.zero_grad()
    loss = error()
    loss.backward()
    return float(loss.item())


class PairError(torch.nn.Module):
    """sum_j w_j E|k_j - c_j sum_l m_l k_l|² over free complex c and m, as a function of real parameters."""

    def __init__(self, keys: Tensor, w: Tensor) -> None:
        super().__init__()
        self.c, self.m = (torch.nn.Parameter(torch.zeros(len(w), 2, dtype=torch.float64)) for _ in range(2))
        self._keys, self._w = keys, w

    def forward(self) -> Tensor:
        c, m = torch.view_as_complex(self.c), torch.view_as_complex(self.m)
        error = torch.eye(len(c)) - c[:, None] * m
        return (self._w * torch.einsum("jl,lm,jm->j", error, self._keys, error.conj()).real).sum()


class FlatError(torch.nn.Module):
    """sum_j E|(x_j - y R_j) L_j|² with y = sum_l x_l M_l over free maps M_l and R_j, the weight L_j² given."""

    def __init__(self, moments: Tensor, weight_rnn: Tensor) -> None:
        super().__init__()
        r, n, _ = weight_rnn.shape
        self.mix = torch.nn.Parameter(torch.zeros(r * n, n, dtype=torch.float64))
        self.back = torch.nn.Parameter(torch.zeros(n, r * n, dtype=torch.float64))
        self._moments, self._weight = moments, torch.block_diag(*weight_rnn)

    def forward(self) -> Tensor:
        error = torch.eye(len(self.mix), dtype=torch.float64) - self.mix @ self.back
        return torch.trace(error.T @ self._moments @ error @ self._weight)
