"""`headpool uptrain`: from a recipe to a trained checkpoint."""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headpool import __version__
from headpool.checkpoint import open_source, read_provenance
from headpool.destination import locked
from headpool.errors import HeadpoolError, RequestError
from headpool.recipe import Recipe
from headpool.uptrain import models
from headpool.uptrain.inputs import describe_data, open_inputs
from headpool.uptrain.loop import Run, train
from headpool.uptrain.metrics import METRICS, Metrics, read_original, write_original
from headpool.uptrain.objective import Objective, model_inputs, squared_norms
from headpool.uptrain.output import write_checkpoint
from headpool.uptrain.parallel import Workers, check_shared, prepare, start_accelerator, wants_sharding
from headpool.uptrain.plan import Plan, fingerprint, plan_uptraining, provenance
from headpool.uptrain.prefetch import Prefetcher
from headpool.uptrain.reporter import Reporter, Shown
from headpool.uptrain.schedule import learning_rate
from headpool.uptrain.signals import PROCESSES
from headpool.uptrain.state import Interval, Shelf, State
from headpool.uptrain.stream import IGNORED, Batch
from headpool.uptrain.validation import Validation


@dataclass(frozen=True)
class Uptraining:
    """What a run made. `loss` is the last step's, per token in nats; `tokens_per_second` is over this attempt's steps,
    None where it made none; `waited` is the share of their time that they waited for data. `resumed_from` is the step
    of the checkpoint that it went on from, None where it began at the start.
    """

    output: str
    tokens: int
    steps: int
    loss: float | None
    tokens_per_second: float | None
    resumed_from: int | None
    validation_perplexity: float | None
    original_perplexity: float | None
    waited: float | None
    processes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """In words, for a person."""
        lines = [f"wrote {self.output}: {self.steps} steps, {self.tokens:,} tokens"]
        if self.loss is not None:
            lines[0] += f", loss {self.loss:.4f}"
        if self.resumed_from is not None:
            lines[0] += f", resumed from step {self.resumed_from}"
        if self.tokens_per_second:
            lines.append(f"{self.tokens_per_second:,.0f} tokens per second on {self.processes} process(es)")
        if self.validation_perplexity is not None:
            original = f" (the original's: {self.original_perplexity:.2f})" if self.original_perplexity else ""
            lines.append(f"validation perplexity {self.validation_perplexity:.2f}{original}")
        return "\n".join(lines)


def uptrain(
    recipe: Recipe,
    *,
    fresh: bool = False,
    replace: bool = False,
    how_to_go_on: str = "the same command goes on from there",
    progress: Shown = lambda done, total, note: None,
) -> Uptraining:
    """Train as the recipe's uptrain section says, from where an earlier attempt stopped, and write DIR/uptrained.

    Every process of a distributed run calls this. `fresh` drops the state of earlier attempts; `replace` drops that of
    a finished run with other settings. Raises RequestError, before training starts, for what is impossible, and
    HeadpoolError for what fails; Interrupted when a signal stopped it, with its state saved.
    """
    section = recipe.uptrain
    plan_uptraining(recipe)  # refuses what it can before other processes are waited for
    assert section is not None
    work = Path(recipe.output) / "work" / "uptrain"
    accelerator = start_accelerator(section, str(work))
    _check_processes(accelerator)
    plan = plan_uptraining(recipe, world=accelerator.num_processes)
    if plan.output.exists() and not _made_by_training(plan.output):
        raise RequestError(f"{plan.output} exists and was not made by uptraining; remove it or choose another output")
    with ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(locked(plan.work, f"another process is training in {plan.work}"))
        settings = plan.settings()
        shelf = Shelf(plan.work / "state", keep=section.keep, settings=settings)
        if accelerator.is_main_process:
            shelf.clear(fresh=fresh, finished=replace)
        check_shared(plan.work, accelerator)
        shelf.check()
        return _attempt(plan, shelf, settings, accelerator, stack, how_to_go_on, progress)


def _check_processes(accelerator: Accelerator) -> None:
    """Refuse to train with another number of processes than were meant to be there."""
    wanted = os.environ.get(PROCESSES) or os.environ.get("WORLD_SIZE")
    if wanted is not None and int(wanted) != accelerator.num_processes:
        raise HeadpoolError(f"{wanted} processes were asked for, {accelerator.num_processes} came up")


def _attempt(
    plan: Plan,
    shelf: Shelf,
    settings: Mapping[str, Any],
    accelerator: Accelerator,
    stack: ExitStack,
    how_to_go_on: str,
    progress: Shown,
) -> Uptraining:
    section = plan.section
    inputs = open_inputs(plan, accelerator.process_index, accelerator.num_processes)
    batches, validation = stack.enter_context(Prefetcher(inputs.stream)), inputs.validation
    torch.manual_seed(plan.recipe.seed)
    objective = models.load_objective(plan, None if wants_sharding(section) else accelerator.device)
    if section.document_attention:
        models.check_isolation(objective.student, section.micro_batch)
    workers = prepare(objective, section, accelerator)
    state = State(workers, batches)
    restored = shelf.restore(state)
    resumed_from = state.step if restored else None
    objective.block_scales = state.block_scales
    metrics = Metrics(plan.work / METRICS)
    if accelerator.is_main_process:
        metrics.resume(state.step if restored else -1)
    original = _original_perplexity(plan, validation, workers)
    reporter = Reporter(plan, workers, metrics, progress)
    run = Run(
        workers=workers,
        state=state,
        batches=batches,
        shelf=shelf,
        steps=plan.steps,
        batch_tokens=plan.batch_tokens,
        micro_batch=section.micro_batch,
        clip=section.clip,
        document_attention=section.document_attention,
        rate=lambda step: learning_rate(section.schedule, section.learning_rate, step, plan.steps),
        save_every=Interval(section.save_every),
        eval_every=plan.eval_every,
        validate=lambda: validation.perplexity(workers.wrapped, workers, section.micro_batch) if validation else 0.0,
        look_at_first=lambda batch: _set_block_scales(run, plan, batch),
        report=reporter,
        how_to_go_on=how_to_go_on,
    )
    train(run)
    details = {
        "tokens": state.tokens,
        "steps": state.step,
        "options": settings,
        "data": describe_data(plan, inputs.stream),
        "versions": _versions(),
        "machine": {"device": accelerator.device.type, "processes": workers.world},
    }
    write_checkpoint(workers, plan.source, plan.output, provenance(plan, details))
    last = reporter.finish(original)
    return Uptraining(
        output=str(plan.output),
        tokens=state.tokens,
        steps=state.step,
        loss=last.get("loss"),
        tokens_per_second=reporter.tokens_per_second(),
        resumed_from=resumed_from,
        validation_perplexity=last.get("validation_perplexity"),
        original_perplexity=original,
        waited=run.waited / reporter.seconds if reporter.seconds else None,
        processes=workers.world,
    )


def _set_block_scales(run: Run, plan: Plan, batch: Batch) -> None:
    """Measure, on a run's first batch, how large the teacher's block outputs are: distances are relative to that."""
    objective = run.workers.objective
    if not plan.blocks or objective.teacher is None:
        return
    device = run.workers.accelerator.device
    parts = []
    for at in range(0, len(batch.input_ids), run.micro_batch):
        part = slice(at, at + run.micro_batch)
        counted_BT = (batch.labels[part] != IGNORED).to(device)
        positions = batch.position_ids[part].to(device) if run.document_attention else None
        inputs = model_inputs(batch.input_ids[part].to(device), positions)
        norms = squared_norms(objective.teacher.read(inputs), counted_BT)
        parts.append(torch.cat([norms, counted_BT.sum().double()[None]]))
    *squares, tokens = run.workers.total(torch.stack(parts).sum(0)).tolist()
    run.state.block_scales = objective.block_scales = [one / tokens for one in squares]


def _original_perplexity(plan: Plan, validation: Validation | None, workers: Workers) -> float | None:
    """The original's level on the validation text, measured once; None where training starts from the original, or
    where it would need a second whole model beside a sharded one.
    """
    if validation is None or plan.recipe.convert is None:
        return None
    measured_with = [fingerprint(open_source(plan.recipe.model, plan.recipe.revision)), plan.validation_settings()]
    held = read_original(plan.work)
    if held.get("of") == measured_with:
        return float(held["perplexity"])
    teacher = workers.objective.teacher
    if workers.sharded and teacher is None:
        return None
    source = open_source(plan.recipe.model, plan.recipe.revision)
    same = plan.teacher is not None and plan.teacher.directory == source.directory
    model = teacher.model if teacher and same else models.load_teacher(source, plan.section, workers.accelerator.device)
    perplexity = validation.perplexity(
        Objective(model, plan.family, len(plan.layers)), workers, plan.section.micro_batch
    )
    model.eval()
    if workers.accelerator.is_main_process:
        write_original(plan.work, perplexity, measured_with)
    return perplexity


def _versions() -> dict[str, str]:
    others = {name: metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    return {"headpool": __version__, "python": sys.version.split()[0], **others}


def _made_by_training(out: Path) -> bool:
    return "uptrain" in (read_provenance(out) or {})
