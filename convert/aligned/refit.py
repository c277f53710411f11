"""Step 4 of aligned conversion: the output projection, corrected in closed form by what attention really gives.

With z (the head outputs of the converted attention, side by side) and the original layer's output y on calibration
text, the correction of W_0 is ridge regression on the residual: W = W_0 + (Z^T Z + lambda I)^-1 Z^T (Y - Z W_0).
Regression on Y itself would shrink a W_0 that is exact already.

Shape suffixes: N tokens, Z = h*d features (query heads times head_dim), D hidden.
"""

from dataclasses import replace

import torch
from torch import Tensor

from headpool.convert.layouts import AttentionWeights
from headpool.errors import RequestError


class Normal:
    """Sums over calibration tokens in float64: what the normal equations need, and nothing that grows with the text."""

    def __init__(self, features: int, hidden: int, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.zz, self.zr = zeros(features, features), zeros(features, hidden)
        self.z, self.r = zeros(features), zeros(hidden)
        self.rr, self.count = zeros(), 0

    def add(self, z: Tensor, residual: Tensor) -> None:
        """Take tokens in: z [N, h*d] and residual y - z W_0 (less the output bias) [N, D]."""
        z_NZ, r_ND = z.double(), residual.double()
        self.zz.addmm_(z_NZ.mT, z_NZ)
        self.zr.addmm_(z_NZ.mT, r_ND)
        self.z += z_NZ.sum(0)
        self.r += r_ND.sum(0)
        self.rr += r_ND.square().sum()
        self.count += len(z_NZ)

    def squared_error(self, correction: Tensor, intercept: Tensor) -> Tensor:
        """The squared error over all tokens with W_0 + correction [h*d, D] and intercept [D] added to the bias."""
        crossed = (correction * self.zr).sum() + intercept @ self.r
        squared = (correction * (self.zz @ correction)).sum() + self.count * intercept @ intercept
        return self.rr - 2 * crossed + squared + 2 * self.z @ correction @ intercept


def refit_output(weights: AttentionWeights, normal: Normal, ridge: float) -> AttentionWeights:
    """The layer with o (and bias_o, where it has one) refitted on the tokens that `normal` has seen; float64.

    `ridge` is lambda relative to the mean diagonal element of Z^T Z; 0 is allowed, and takes the shortest solution
    where features are dependent. The squared error on those tokens is at most what it was: where rounding says
    otherwise, o stays. RequestError where the sums are not finite.
    """
    assert weights.o is not None
    o_hDd = weights.o.double()
    if not all(sums.isfinite().all() for sums in (normal.zz, normal.zr, normal.rr)):
        raise RequestError(
            "the outputs of attention on the calibration text are not finite, or too large to be squared"
        )
    nothing = normal.zr.new_zeros(normal.zr.shape), normal.r.new_zeros(normal.r.shape)
    correction, intercept = _solve(normal, ridge, with_intercept=weights.bias_o is not None)
    if not normal.squared_error(correction, intercept) < normal.squared_error(*nothing):
        correction, intercept = nothing
    o_hDd = o_hDd + correction.view(len(o_hDd), -1, o_hDd.shape[1]).mT
    return replace(weights, o=o_hDd, bias_o=None if weights.bias_o is None else weights.bias_o.double() + intercept)


def _solve(normal: Normal, ridge: float, *, with_intercept: bool) -> tuple[Tensor, Tensor]:
    """The correction [h*d, D] and the intercept [D], which is not shrunk: it is regression about the means."""
    zz, zr = normal.zz, normal.zr
    if with_intercept and normal.count > 0:
        zz = zz - normal.z[:, None] * normal.z / normal.count
        zr = zr - normal.z[:, None] * normal.r / normal.count
    eye = torch.eye(len(zz), dtype=zz.dtype, device=zz.device)
    regular = zz + ridge * zz.diagonal().mean() * eye
    factor, failed = torch.linalg.cholesky_ex(regular)
    if failed or ridge <= 0:
        correction = torch.linalg.pinv(regular, hermitian=True) @ zr
    else:
        correction = torch.cholesky_solve(zr, factor)
    intercept = torch.zeros_like(normal.r)
    if with_intercept and normal.count > 0:
        intercept = (normal.r - normal.z @ correction) / normal.count
    return correction, intercept
