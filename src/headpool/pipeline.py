"""The stages of `headpool run`, each skipped when its output is there and was made from the same inputs and options."""

import glob
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool import __version__, card, families
from headpool.card import REPORT
from headpool.checkpoint import PROVENANCE, Source, locate, open_source
from headpool.destination import check_destination, locked, staged
from headpool.errors import RequestError
from headpool.geometry import parse_size
from headpool.progress import Progress
from headpool.recipe import EvalSection, Recipe
from headpool.sections import FREE, UptrainSection
from headpool.text import read_documents, read_texts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headpool.eval.models import ModelSpec


@dataclass(frozen=True)
class StageResult:
    name: str
    seconds: float
    skipped: bool


@dataclass(frozen=True)
class RunResult:
    """What a run made; `report` is None for a recipe without an eval section."""

    output: str
    stages: tuple[StageResult, ...]
    report: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> "RenderableType":
        """For a person: the report's table, the stages, and where everything is."""
        from rich.console import Group

        lines = [
            f"{one.name}: {'done before, skipped' if one.skipped else f'{one.seconds:.1f} s'}" for one in self.stages
        ]
        if self.report is None:
            return Group(*lines, f"output: {self.output}")
        from headpool.eval.page import PAGE
        from headpool.eval.report import read_report
        from headpool.eval.tables import table

        report = Path(self.report)
        return Group(table(read_report(report)), *lines, f"output: {self.output}", f"report: {report.with_name(PAGE)}")


@dataclass(frozen=True)
class Stage:
    """A piece of a run: `run` makes the directory `output` at one stroke from what `inputs` describes, with a file
    `mark` in it by which it is known for ours. `after` is done when the output is there, and told whether it was there
    before.
    """

    name: str
    output: Path
    mark: str
    inputs: Mapping[str, Any]
    run: Callable[[], None]
    after: Callable[[bool], None] = lambda skipped: None

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([__version__, self.inputs], sort_keys=True).encode()).hexdigest()

    def state(self) -> dict[str, Any]:
        """What is noted of a finished stage: what it was made from, and the output as it stands."""
        return {"fingerprint": self.fingerprint, "output": identity(self.output)}


def run_recipe(recipe: Recipe, *, fresh: bool = False) -> RunResult:
    """Bring a recipe's output directory up to date, one stage after another.

    A stage is skipped when its output is the one that was noted when it was finished, with the same fingerprint of
    inputs and options; otherwise it runs, and replaces what it made before when it is done. So a killed run goes on
    where it was.
    `fresh` runs every stage.

    Raises RequestError, before anything is written, for what is impossible or is not there, for an output that no run
    made, and when another run is writing there.
    """
    _check(recipe)
    root = Path(recipe.output)
    work = root / "work"
    with locked(work, f"another run is writing {root}"):
        results = [
            _bring_up_to_date(stage, work / f"{stage.name}.json", fresh=fresh)
            for stage in _stages(recipe, root, fresh=fresh)
        ]
    report = root / "report" / "report.json" if recipe.eval else None
    return RunResult(str(root), tuple(results), str(report) if report else None)


def _check(recipe: Recipe) -> None:
    """Refuse what a later stage would refuse only after an earlier one has worked for long."""
    from headpool.convert.plan import plan_conversion
    from headpool.convert.transcode import transcribe

    source = start = open_source(recipe.model, recipe.revision)
    if (section := recipe.convert) is not None:
        check_destination(Path(recipe.output) / "converted", overwrite=True, source=source.directory)
        transcript = transcribe(source, Path(recipe.output) / "work", wanted=section.transcode)
        start = source if transcript is None else transcript.planned
        plan_conversion(start, kv_heads=section.kv_heads, method=section.method, dtype=section.dtype)
        if section.calibration is not None:
            read_documents(section.calibration, section.text_column)
    if recipe.uptrain is not None:
        from headpool.launch import check_options
        from headpool.uptrain.inputs import open_inputs
        from headpool.uptrain.plan import plan_uptraining

        check_options(recipe.uptrain.launch or {})
        open_inputs(plan_uptraining(recipe, world=recipe.uptrain.processes, made=False, start=start))
    if recipe.eval is not None:
        _check_eval(recipe, recipe.eval, source)


def _check_eval(recipe: Recipe, section: EvalSection, source: Source) -> None:
    limit = families.get(source.config, families.find_family(source.config), "max_position_embeddings")
    lengths = [("window", section.window or 0), *(("context", context) for context in section.contexts)]
    for what, length in lengths:
        if limit is not None and length > limit:
            raise RequestError(f"{what} {length} is larger than the {limit} positions of {recipe.model}")
    read_texts(section.data, section.text_column, config=section.data_config, split=section.split)
    if section.tasks:
        from headpool.eval.tasks import Tasks

        Tasks(section.tasks)


def _stages(recipe: Recipe, root: Path, *, fresh: bool) -> Iterator[Stage]:
    """The stages in order; each knows its inputs when its turn has come, since they may be an earlier one's output."""
    converted, uptrained, report = root / "converted", root / "uptrained", root / "report"
    original = {"model": identity(locate(recipe.model, recipe.revision)), "revision": recipe.revision}
    made = []
    if recipe.convert is not None:
        text = recipe.convert.calibration
        inputs = {
            **original,
            "seed": recipe.seed,
            "options": recipe.convert.model_dump(exclude={"calibration"}),
            "calibration": text and _identity_of_data(text),
        }
        work = root / "work" / "convert"
        yield Stage("convert", converted, PROVENANCE, inputs, lambda: _convert(recipe, converted, work))
        made.append(converted)
    if recipe.uptrain is not None:
        if recipe.eval is not None and made:
            yield _evaluation("eval before uptraining", recipe, recipe.eval, original, made, root / "work" / "before")
        yield _training(recipe, recipe.uptrain, original, made, uptrained, fresh=fresh)
        made = [*made, uptrained]
    if recipe.eval is not None:
        record = root / "work" / "uptrain" if recipe.uptrain else None
        yield _evaluation("eval", recipe, recipe.eval, original, made, report, record)


def _evaluation(
    name: str,
    recipe: Recipe,
    section: EvalSection,
    original: Mapping[str, Any],
    made: list[Path],
    out: Path,
    record: Path | None = None,
) -> Stage:
    """What a run has made so far, beside the original; with the course of the training that left a record."""
    inputs = {
        **original,
        "made": [identity(one) for one in made],
        "data": _identity_of_data(section.data),
        "options": section.model_dump(exclude={"data"}),
        "tasks": [_identity_of_data(task) for task in section.tasks],
    }
    from headpool.eval.models import ModelSpec

    models = [ModelSpec("baseline", recipe.model, recipe.revision), *(ModelSpec("model", str(one)) for one in made)]
    made, final = list(made), name == "eval"  # the list grows with the stages to come
    return Stage(
        name,
        out,
        REPORT,
        inputs,
        lambda: _evaluate(recipe, section, models, out, record),
        lambda skipped: _refresh_cards(recipe, made, out, keep=skipped and not final),
    )


def _refresh_cards(recipe: Recipe, made: Sequence[Path], report: Path, *, keep: bool) -> None:
    """Have an evaluation on the cards of what it measured, where they do not show it; `keep` those that show any."""
    from headpool.measured import is_shown, refresh_card

    for one in made:
        if not (keep and (one / REPORT).is_file()) and not is_shown(one, report):
            refresh_card(one, report, recipe)


def _training(
    recipe: Recipe,
    section: UptrainSection,
    original: Mapping[str, Any],
    made: list[Path],
    out: Path,
    *,
    fresh: bool,
) -> Stage:
    texts = [one.path for one in section.data] + ([section.validation.path] if section.validation else [])
    inputs = {
        **(original if not made or section.distillation else {}),
        "made": [identity(one) for one in made],
        "data": [_identity_of_data(text) for text in texts],
        "teacher": section.teacher and _identity_of_data(section.teacher),
        "seed": recipe.seed,
        "options": section.model_dump(mode="json", exclude=FREE),
    }
    return Stage("uptrain", out, PROVENANCE, inputs, lambda: _uptrain(recipe, section, fresh=fresh))


def _identity_of_data(name: str) -> Any:
    """Of a file, of the files that a pattern names, or the hub's name for a data set."""
    path = Path(name)
    files = [path] if path.exists() else sorted(map(Path, glob.glob(name, recursive=True)))  # noqa: PTH207
    return [identity(file) for file in files] or name


def _convert(recipe: Recipe, out: Path, work: Path) -> None:
    from headpool.convert.aligned.options import Alignment
    from headpool.convert.run import convert_checkpoint

    assert recipe.convert is not None
    section = recipe.convert
    with Progress("tokens") as aligning, Progress("bytes") as progress:
        alignment = Alignment(
            calibration=read_documents(section.calibration, section.text_column) if section.calibration else None,
            text_column=section.text_column,
            tokens=section.calibration_tokens,
            window=section.calibration_window,
            groups=section.groups,
            refit=section.refit,
            heal=section.heal,
            heal_scope=section.heal_scope,
            learning_rate=section.heal_learning_rate,
            device=section.device,
            work=work,
            progress=lambda done, total: aligning("align", done, total),
        )
        convert_checkpoint(
            recipe.model,
            out,
            kv_heads=section.kv_heads,
            method=section.method,
            dtype=section.dtype,
            transcode=section.transcode,
            max_shard_size=parse_size(section.max_shard_size) if section.max_shard_size else None,
            revision=recipe.revision,
            seed=recipe.seed,
            overwrite=True,
            alignment=alignment,
            progress=lambda done, total: progress("convert", done, total),
            transcoding=lambda done, total: progress("transcode", done, total),
        )


def _uptrain(recipe: Recipe, section: UptrainSection, *, fresh: bool) -> None:
    if section.launch is not None:
        from headpool.launch import launch_uptraining

        launch_uptraining(recipe, section.launch, fresh=fresh)
        return
    from headpool.uptrain.run import uptrain

    with Progress("tokens") as progress:
        uptrain(recipe, fresh=fresh, replace=True, progress=partial(progress, "uptrain"))


def _evaluate(
    recipe: Recipe,
    section: EvalSection,
    models: Sequence["ModelSpec"],
    out: Path,
    record: Path | None = None,
) -> None:
    from headpool.eval.measure import evaluate
    from headpool.eval.page import draw
    from headpool.eval.report import write_report
    from headpool.uptrain.metrics import read_record

    data = read_texts(section.data, section.text_column, config=section.data_config, split=section.split)
    with Progress("tokens") as progress:
        report = evaluate(
            models,
            data,
            window=section.window,
            stride=section.stride,
            batch_size=section.batch_size,
            dtype=section.dtype,
            device=section.device,
            contexts=section.contexts,
            batches=section.batches,
            tasks=section.tasks,
            prompts=section.prompts,
            progress=progress,
        )
    with staged(out, overwrite=True) as staging:
        write_report(report, staging, recipe=recipe.to_yaml(), training=read_record(record) if record else None)
        draw(staging)


def _bring_up_to_date(stage: Stage, note: Path, *, fresh: bool) -> StageResult:
    begin = time.perf_counter()
    if stage.output.exists():
        if not fresh and _read_note(note) == stage.state():
            stage.after(True)
            return StageResult(stage.name, 0.0, skipped=True)
        if not (stage.output / stage.mark).is_file():
            raise RequestError(f"{stage.output} exists and was not made by a run; remove it or choose another output")
    stage.run()
    partial = note.with_suffix(".partial")
    partial.write_text(json.dumps(stage.state()) + "\n", encoding="utf-8")
    partial.replace(note)
    stage.after(False)
    return StageResult(stage.name, time.perf_counter() - begin, skipped=False)


def _read_note(note: Path) -> Any:
    try:
        return json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def identity(path: Path) -> list[list[str | int]]:
    """What identifies a file, or the files right inside a directory, without reading them: names, sizes, times.

    A card, and what it shows, does not count: it is drawn anew.
    """
    files = [path]
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.is_file() and one.name not in card.FILES)
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
