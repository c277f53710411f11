"""Student and teacher in memory, in their stock class."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from headpool import families
from headpool.checkpoint import Source
from headpool.errors import RequestError
from headpool.loading import load_model, stock_class
from headpool.sections import UptrainSection
from headpool.uptrain.objective import Objective, Teacher
from headpool.uptrain.optimizer import choose_trainable
from headpool.uptrain.plan import Plan


def load_objective(plan: Plan, device: torch.device | None) -> Objective:
    """The student with its teacher, ready to be distributed; None leaves the student on the CPU, to be sharded there.

    Raises RequestError where a checkpoint does not fit its class, or a kernel that was asked for is not installed.
    """
    section = plan.section
    student = load_model(plan.source, torch.float32, None if device is None else str(device), section.attention)
    choose_trainable(student, plan.family, section.train)
    if section.gradient_checkpointing:
        recompute_activations(student)
    if section.liger:
        apply_liger(student)
    teacher = None
    if plan.teacher is not None:
        family = families.find_family(plan.teacher.config)
        teacher = Teacher(load_teacher(plan.teacher, section, device), family, len(plan.layers))
    objective = Objective(student, plan.family, len(plan.layers), teacher, plan.loss, plan.blocks)
    if section.compile:
        student.compile()
    return objective.train()


def recompute_activations(model: Any) -> None:
    """Gradient checkpointing, by the name that the installed transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def load_teacher(source: Source, section: UptrainSection, device: torch.device | None) -> Any:
    """In its own precision; in float32 on a CPU, where others are slow."""
    on_gpu = torch.cuda.is_available() and (device is None or device.type != "cpu")
    target = device or torch.device("cuda" if on_gpu else "cpu")
    return load_model(source, "auto" if on_gpu else torch.float32, str(target), section.attention)


def apply_liger(model: Any) -> None:
    """Replace norms, rotary embeddings and MLPs by liger-kernel's fused ones; the loss is ours."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


def build_on_meta(config_directory: Path) -> Any:
    """The model of a config without any memory."""
    config = AutoConfig.from_pretrained(config_directory, trust_remote_code=False)
    model_class = stock_class(config)
    build = getattr(model_class, "from_config", model_class)  # an Auto class is not built itself
    with torch.device("meta"):
        return build(config)


def check_same_tokens(student: Any, teacher: Any, teacher_name: str) -> None:
    """Refuse a teacher whose tokenizer reads text as other tokens."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        differ = sorted(ours.items() ^ theirs.items(), key=lambda pair: pair[1])
        raise RequestError(
            f"the teacher {teacher_name} has another vocabulary: {len(theirs)} tokens against {len(ours)}, "
            f"of which {len({token for token, _ in differ})} differ, such as {differ[0][0]!r}"
        )


def check_isolation(model: Any, rows: int) -> None:
    """Refuse a model whose attention looks across documents although positions start anew at each: what it computes
    for a second document must not depend on the first.
    """
    device = next(model.parameters()).device
    ids = torch.arange(2, 18, device=device).expand(min(rows, 2), -1) % model.config.get_text_config().vocab_size
    other = torch.cat([ids[:, :8].flip(1), ids[:, 8:]], dim=1)
    positions = torch.arange(8, device=device).repeat(2).expand_as(ids)
    half = torch.autocast(device.type, torch.bfloat16, enabled="flash" in model.config._attn_implementation)
    was_training = model.training
    model.eval()
    with torch.no_grad(), half:
        first, second = (model(input_ids=one, position_ids=positions, use_cache=False).logits for one in (ids, other))
    model.train(was_training)
    if not torch.equal(first[:, 8:], second[:, 8:]):
        raise RequestError(
            f"document_attention: {model.config.model_type} with attention {model.config._attn_implementation} looks "
            "across documents; try attention: sdpa, or, where layers carry a state along, do without it"
        )
