"""What is minimised: the student's losses on a batch, and the teacher that it may learn from.

Shape suffixes: B sequences, T tokens of one, D hidden, V vocabulary, n a few of the B * T positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headpool.errors import RequestError
from headpool.families import attention_tensor, in_class
from headpool.family import Family
from headpool.uptrain.loss import Distillation, token_losses
from headpool.uptrain.stream import IGNORED


def attention_blocks(model: nn.Module, family: Family, layers: int) -> list[nn.Module]:
    """The attention modules of a language model, in the order of its layers, also where it is a part of `model`.

    Raises RequestError where the class keeps them under names that are not known.
    """
    family = in_class(family)
    named = dict(model.named_modules())
    found = {layer: named.get(family.attention.format(layer)) for layer in range(layers)}
    if not any(found.values()):
        held = ((attention_tensor(family, f"{name}.weight"), module) for name, module in named.items())
        found = {one.layer: module for one, module in held if one is not None and one.suffix == "weight"}
    blocks = [block for _, block in sorted(found.items()) if block is not None and hasattr(block, family.output)]
    if not blocks:
        raise RequestError(f"distill.blocks: where the attention of {type(model).__name__} stands is not known")
    return blocks


class BlockTap:
    """Listens to the outputs of a model's attention blocks while it is open, and only then: gradient checkpointing
    runs the blocks once more later.
    """

    def __init__(self, model: nn.Module, family: Family, layers: int) -> None:
        self._outputs: list[Tensor] = []
        self._open = False
        for block in attention_blocks(model, family, layers):
            block.register_forward_hook(self._hear)

    def _hear(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._open:
            self._outputs.append(output[0] if isinstance(output, tuple) else output)

    @contextmanager
    def listen(self) -> Iterator[list[Tensor]]:
        """A list that holds, at the end, one [B, T, D] for each layer with attention."""
        self._outputs, self._open = [], True
        try:
            yield self._outputs
        finally:
            self._open = False


class Teacher:
    """The original model: no gradients, its own precision, and logits for a few positions at a time.

    It is no part of the student, so it is neither trained nor sharded nor saved.
    """

    def __init__(self, model: Any, family: Family, layers: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self._tap = BlockTap(model, family, layers)
        self._body = model.base_model
        self._run_body = self._body.forward
        self._given: Any = None

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @torch.no_grad()
    def read(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Run over a batch; returns the outputs of the attention blocks, [B, T, D] each. `logits` answers from now
        on for this batch.
        """
        with torch.autocast(inputs["input_ids"].device.type, enabled=False), self._tap.listen() as blocks:
            self._given = self._body(**inputs, use_cache=False)
        return blocks

    @torch.no_grad()
    def logits(self, begin: int, end: int) -> Tensor:
        """[n, V] for the positions [begin, end) of the batch, flattened.

        The class itself makes them, with whatever it does to logits (caps, scales); its body only hands out what it
        has computed before.
        """
        hidden_1nD = self._given.last_hidden_state.flatten(0, 1)[None, begin:end]
        self._body.forward = lambda *_, **__: replace(self._given, last_hidden_state=hidden_1nD)
        try:
            with torch.autocast(hidden_1nD.device.type, enabled=False):
                positions_1n = torch.zeros(hidden_1nD.shape[:2], dtype=torch.long, device=hidden_1nD.device)
                logits_1nV: Tensor = self.model(input_ids=positions_1n, use_cache=False).logits
        finally:
            self._body.forward = self._run_body
        return logits_1nV[0]


class Objective(nn.Module):
    """The student together with the loss on it, so that what leaves `forward`, and with it DDP and mixed precision,
    are sums and never logits.

    `block_scales` are the mean squared norms per token of the teacher's block outputs, one for each layer.
    """

    def __init__(
        self,
        student: Any,
        family: Family,
        layers: int,
        teacher: Teacher | None = None,
        distillation: Distillation | None = None,
        blocks: float = 0.0,
    ) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher
        self._distillation = distillation
        self._blocks = blocks
        self._tap = BlockTap(student, family, layers) if blocks else None
        self.block_scales: Sequence[float] = ()
        self._no_split_modules = getattr(student, "_no_split_modules", None)  # what accelerate shards by

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        """All arguments [B, T]; without positions they are 0..T-1, and attention is plainly causal.

        Returns `loss`, summed over the positions that count and with a gradient, and without one `sums`:
        [cross-entropy, KL, blocks]. In evaluation mode there is no teacher.
        """
        inputs = model_inputs(input_ids, position_ids)
        teacher = self.teacher if self.training else None
        learned = teacher.read(inputs) if teacher else []
        if self._tap is None or teacher is None:
            logits_BTV = self.student(**inputs, use_cache=False).logits
            blocks = logits_BTV.new_zeros((), dtype=torch.float32)
        else:
            with self._tap.listen() as taught:
                logits_BTV = self.student(**inputs, use_cache=False).logits
            blocks = block_distance(taught, learned, self.block_scales, labels != IGNORED)
        if teacher and self._distillation and self._distillation.weight:
            loss, sums = token_losses(logits_BTV, labels, self._distillation, teacher.logits)
        else:
            loss, sums = token_losses(logits_BTV, labels)
        return {"loss": loss + self._blocks * blocks, "sums": torch.cat([sums, blocks.detach().to(sums)[None]])}

    # accelerate's sharding asks the model that it is given for these.

    def get_input_embeddings(self) -> nn.Module:
        return self.student.get_input_embeddings()  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> nn.Module | None:
        return self.student.get_output_embeddings()  # type: ignore[no-any-return]

    def tie_weights(self) -> None:
        self.student.tie_weights()


def model_inputs(input_ids: Tensor, position_ids: Tensor | None) -> dict[str, Tensor]:
    """Positions are left out where they say nothing: a stock class that is given some builds a mask from them, and
    attention with a mask is slower.
    """
    return {"input_ids": input_ids} if position_ids is None else {"input_ids": input_ids, "position_ids": position_ids}


def block_distance(
    taught: Sequence[Tensor], learned: Sequence[Tensor], scales: Sequence[float], counted_BT: Tensor
) -> Tensor:
    """Sum over layers and counted tokens of squared differences [B, T, D], each layer's divided by its scale.

    The scales do not depend on the batch, hence the sum over a batch is that over its parts.
    """
    total = torch.zeros((), dtype=torch.float32, device=counted_BT.device)
    for student_BTD, teacher_BTD, scale in zip(taught, learned, scales, strict=True):
        squares_BT = (student_BTD.float() - teacher_BTD.float()).square().sum(-1)
        total = total + squares_BT.masked_fill(~counted_BT, 0).sum() / scale
    return total


def squared_norms(blocks: Sequence[Tensor], counted_BT: Tensor) -> Tensor:
    """[layers]: the summed squared norms of block outputs [B, T, D] over the counted tokens."""
    squares = (block_BTD.double().square().sum(-1).masked_fill(~counted_BT, 0).sum() for block_BTD in blocks)
    return torch.stack(list(squares))
