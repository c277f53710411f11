"""What trains, and what trains it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from headpool import families
from headpool.errors import RequestError
from headpool.family import Family
from headpool.sections import UptrainSection


def choose_trainable(model: nn.Module, family: Family, train: str) -> None:
    """Freeze every parameter that `train` (all, attention or kv) leaves out: no gradient, no optimizer state.

    Raises RequestError where nothing would be left to train.
    """
    names = families.in_class(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_trains(names, name, train))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError(f"train: {train} leaves nothing to train in a model of type {family.model_type}")


def _trains(family: Family, name: str, train: str) -> bool:
    if train == "all":
        return True
    held = families.attention_tensor(family, name)
    return held is not None and (train == "attention" or family.attention_tensors.get(held.suffix) == "kv_heads")


def build_optimizer(model: nn.Module, section: UptrainSection) -> torch.optim.Optimizer:
    """The optimizer of a recipe over the parameters that train, weight decay on matrices only."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trainable if one.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [one for one in trainable if one.ndim < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS[section.optimizer]([group for group in groups if group["params"]], section)


def _adamw(groups: list[dict[str, Any]], section: UptrainSection) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, fused=_can_fuse(groups))


def _can_fuse(groups: list[dict[str, Any]]) -> bool:
    """Whether PyTorch has a fused kernel for where these parameters are."""
    return all(one.device.type in ("cpu", "cuda", "mps", "xpu") for group in groups for one in group["params"])


def _adafactor(groups: list[dict[str, Any]], section: UptrainSection) -> torch.optim.Optimizer:
    """Shazeer and Stern 2018, as T5 was pretrained with: steps are relative to each parameter's size."""
    return torch.optim.Adafactor(groups, lr=section.learning_rate)


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]], UptrainSection], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those of the parameters that have one."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
