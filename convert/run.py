"""One checkpoint in, one checkpoint out: plan, write, check, publish by a rename."""

import contextlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headpool import families, opening
from headpool.card import first_card, replace_files
from headpool.check import Check, Report
from headpool.checkpoint import PROVENANCE, Source, locate, open_source, read_config
from headpool.convert.aligned.options import TEXT, Alignment, Prediction
from headpool.convert.plan import Plan, plan_conversion
from headpool.convert.provenance import classes, provenance
from headpool.convert.result import Conversion
from headpool.convert.shards import Progress, write_headers, write_tensors
from headpool.convert.transcode.find import transcoding_of
from headpool.convert.transcode.plan import Transcript, transcribe, work_directory
from headpool.destination import check_destination, check_space, staged
from headpool.errors import HeadpoolError, RequestError
from headpool.family import Family
from headpool.headers import read_json_object

_CONFIG = ".config"
"""Where config.json waits inside the staging directory: until it moves up, nothing there loads."""


def convert_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    kv_heads: int,
    method: str = "mean",
    dtype: str | None = None,
    revision: str | None = None,
    seed: int = 0,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    transcode: bool = False,
    alignment: Alignment | None = None,
    progress: Progress = lambda done, total: None,
    transcoding: Progress = lambda done, total: None,
) -> Conversion:
    """Convert `model`, a directory or a hub id, to `kv_heads` K/V heads per layer, into the new directory `out`.

    Args:
        method: mean, first or random (Ainslie et al. 2023, section 2.1 and figure 4), or aligned (docs/method.md).
        dtype: float32, float16, bfloat16 or float64 for all floating tensors; None keeps each as it is.
        seed: for method random, and for the order of calibration text.
        max_shard_size: bytes of tensors per file; None keeps the source's division.
        dry_run: plan and validate, write nothing.
        transcode: where the model's own class cannot hold fewer K/V heads, write it as another that computes the same
            function first (docs/transcoding.md).
        alignment: for method aligned; None aligns by the weights alone. Its text, for mean and first where norms have
            gains for every key head.
        progress: called with the source bytes dealt with so far and in all; transcoding: likewise, before.

    Raises:
        RequestError: the request is impossible or the source is not what it claims to be; nothing is written.
        HeadpoolError: writing failed; nothing is left behind.
    """
    begin = time.perf_counter()
    out = Path(out)
    source = _source(str(model), revision, out, overwrite=overwrite, transcode=transcode)
    alignment = alignment or Alignment()
    transcript = transcribe(source, work_directory(out), wanted=transcode)
    work = _Work(
        plan=_planned(source, transcript, kv_heads, method, dtype, max_shard_size, alignment),
        transcript=transcript,
        alignment=alignment,
        out=out,
        overwrite=overwrite,
        seed=seed,
        max_shard_size=max_shard_size,
    )
    _check(work, dry_run=dry_run)
    found = _foreseen(work, transcoding) if dry_run else _made(work, progress, transcoding)
    return Conversion(
        output=str(out),
        method=method,
        source_kv_heads=work.plan.source_kv_heads,
        kv_heads=kv_heads,
        pooled_tensors=len(work.plan.changed),
        copied=not work.plan.units,
        transcoded=classes(work.plan),
        dry_run=dry_run,
        output_bytes=work.plan.nbytes,
        seconds=time.perf_counter() - begin,
        peak_rss_bytes=_peak_rss_bytes(),
        warnings=found.warnings,
        layers=found.layers,
        predictions=found.predictions,
        estimate=found.estimate,
    )


@dataclass(frozen=True)
class _Work:
    """A conversion before it is done: its plan, what has to be there for that, and where it goes."""

    plan: Plan
    transcript: Transcript | None
    alignment: Alignment
    out: Path
    overwrite: bool
    seed: int
    max_shard_size: int | None


@dataclass(frozen=True)
class _Found:
    """What a conversion, or a dry run of it, has to tell besides what was planned."""

    warnings: tuple[str, ...] = ()
    layers: tuple[dict[str, Any], ...] = ()
    predictions: tuple[Prediction, ...] = ()
    estimate: dict[str, Any] | None = None


def _check_family(config: Mapping[str, Any], *, transcode: bool) -> None:
    """RequestError for a model that no weights would help to convert."""
    if transcoding_of(config, wanted=transcode) is None:
        families.family_of(config)


def _source(model: str, revision: str | None, out: Path, *, overwrite: bool, transcode: bool) -> Source:
    """What is to be converted. Raises RequestError also where it could not be written to `out`."""
    check_destination(out, overwrite=overwrite, source=Path(model) if Path(model).is_dir() else None)
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise RequestError(f"{out} holds no checkpoint, and --overwrite replaces nothing else")
    _check_family(read_config(locate(model, revision, weights=False))[1], transcode=transcode)
    return open_source(model, revision)


def _planned(
    source: Source,
    transcript: Transcript | None,
    kv_heads: int,
    method: str,
    dtype: str | None,
    max_shard_size: int | None,
    alignment: Alignment,
) -> Plan:
    return plan_conversion(
        source if transcript is None else transcript.planned,
        kv_heads=kv_heads,
        method=method,
        dtype=dtype if transcript is None else dtype or transcript.dtype,
        max_shard_size=max_shard_size,
        whole_layers=method == "aligned" and alignment.whole_layers,
    )


def _check(work: _Work, *, dry_run: bool) -> None:
    """RequestError for what the plan says is impossible, HeadpoolError where there is no room for it."""
    plan, alignment = work.plan, work.alignment
    check_space(work.out, plan.nbytes + (0 if work.transcript is None else work.transcript.nbytes))
    _check_alignment(plan, alignment)
    if alignment.plot is not None and not (dry_run and plan.method.aligned and alignment.calibration is not None):
        raise RequestError("a plot is made of what a dry run with calibration text predicts")


def _foreseen(work: _Work, transcoding: Progress) -> _Found:
    """What aligning on text would lose, for every number of K/V heads; nothing for other methods."""
    if not (work.plan.method.aligned and work.alignment.calibration is not None and work.plan.units):
        return _Found()
    from headpool.convert.aligned.predict import predict

    with _written(work.transcript, work_directory(work.out), transcoding):
        predictions, estimate = predict(work.plan, work.alignment, work.seed)
    return _Found(predictions=tuple(predictions), estimate=estimate)


def _made(work: _Work, progress: Progress, transcoding: Progress) -> _Found:
    """Do it: transcode where that is planned, compute what the method needs, write, check, rename."""
    plan, alignment = work.plan, work.alignment
    with (
        _written(work.transcript, work_directory(work.out), transcoding),
        _prepared(plan, work.out, alignment, work.seed) as (prepared, facts),
    ):
        done = provenance(plan, work.seed, facts, alignment, work.max_shard_size)
        warnings = _write(plan, work.out, done, prepared, overwrite=work.overwrite, seed=work.seed, progress=progress)
    return _Found(warnings=(*warnings, *_short_of_text(alignment, facts)), layers=tuple(facts.get("layers", ())))


def _check_alignment(plan: Plan, alignment: Alignment) -> None:
    """RequestError for settings that the method does without, or does without where there is no text."""
    if plan.method.aligned and alignment.calibration is None and (idle := alignment.needing_text()):
        raise RequestError(f"method aligned does without {', '.join(idle)} where it has no calibration text")
    given = [] if plan.method.aligned else alignment.chosen()
    calibrates = plan.method.calibrates_gains and plan.gained and alignment.calibration is not None
    if without := [name for name in given if not (calibrates and name in TEXT)]:
        text = ", or for mean and first where norms have gains for every key head" * (set(without) <= set(TEXT))
        raise RequestError(
            f"method {plan.method.name} does without {', '.join(without)}, for method aligned only{text}"
        )


def _written(transcript: Transcript | None, work: Path, progress: Progress) -> contextlib.AbstractContextManager[None]:
    """While the block runs, what the plan reads is there."""
    if transcript is None:
        return contextlib.nullcontext()
    from headpool.convert.transcode.write import written

    return written(transcript, work, progress)


@contextlib.contextmanager
def _prepared(plan: Plan, out: Path, alignment: "Alignment", seed: int) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """The directory with what was computed for the conversion before it is written, and what headpool.json says of it.

    It is kept when something goes wrong, so that the same conversion goes on at the layer where it was.
    """
    if not plan.units or not (plan.method.aligned or alignment.calibration is not None):
        yield None, {}
        return
    from headpool.convert.aligned.run import prepare

    directory = alignment.work or out.absolute().with_name(f".{out.name}.aligning")
    try:
        facts = prepare(plan, alignment, directory, seed, out)
    except OSError as error:
        raise HeadpoolError(f"{directory}: {error.strerror}; the layers that are done are kept there") from error
    except RequestError:  # nothing to go on with: the same request would be refused again
        shutil.rmtree(directory, ignore_errors=True)
        raise
    yield directory, facts
    shutil.rmtree(directory)


def _write(
    plan: Plan,
    out: Path,
    done: dict[str, Any],
    prepared: Path | None,
    *,
    overwrite: bool,
    seed: int,
    progress: Progress,
) -> tuple[str, ...]:
    """Returns what there is to be warned of."""
    config = read_json_object(plan.config_text.encode(), "config.json")
    with staged(out, overwrite=overwrite) as staging:
        (staging / _CONFIG).mkdir()
        (staging / _CONFIG / "config.json").write_text(plan.config_text, encoding="utf-8", newline="")
        write_headers(plan, staging)
        check = Check(staging / _CONFIG, staging)
        try:
            _copy_sidecars(plan.source, staging)
            _write_json(staging / PROVENANCE, done)
            with ThreadPoolExecutor(max_workers=1) as beside:  # drawing takes as long as copying a gigabyte
                card = beside.submit(first_card, staging, out.resolve().name, config)
                write_tensors(plan, staging, seed=seed, progress=progress, prepared=prepared)
            replace_files(staging, card.result())  # here: a thread that a signal leaves behind must not write
            inherited = _judge(check.result(), plan)
        finally:
            check.kill()
        if inherited:
            _write_json(staging / PROVENANCE, done | {"check": inherited.names()})
        (staging / _CONFIG / "config.json").rename(staging / "config.json")
        (staging / _CONFIG).rmdir()
    warnings = (*opening.warnings(config), *plan.warnings)
    if inherited:
        warnings = (f"the source itself does not fit its class ({inherited}); the result inherits that", *warnings)
    return warnings


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _short_of_text(alignment: "Alignment", facts: dict[str, Any]) -> tuple[str, ...]:
    options = facts.get("options", {})
    held = options.get("calibration_windows", 0) * options.get("calibration_window", 0)
    if alignment.calibration is None or not 0 < held < alignment.tokens:
        return ()
    return (f"{alignment.calibration.name} holds {held:,} of the {alignment.tokens:,} calibration tokens asked for",)


def _copy_sidecars(source: Source, staging: Path) -> None:
    for name, copy in source.sidecars().items():
        (staging / copy).parent.mkdir(exist_ok=True)
        shutil.copyfile(source.directory / name, staging / copy)


def _judge(report: Report, plan: Plan) -> Report | None:
    """Refuse a result that fits its class less well than the source does, and a source whose weights contradict its
    config; give the faults that both have.
    """
    if not report:
        return None
    original = Check(plan.source.directory, plan.source.directory).result()
    if (contradiction := _contradiction(original, plan)) is not None:
        raise RequestError(f"weights and config contradict each other: {contradiction}")
    if worse := report.beyond(original):
        raise RequestError(f"the result does not fit its class, and was removed: {worse}")
    return report


def _contradiction(original: Report, plan: Plan) -> str | None:
    """What a source's tensors say against its config, one thing of it: another shape, attention that lacks a tensor or
    has one too many.
    """
    if original.mismatched:
        return original.mismatched[0]
    loaded = families.in_class(families.find_family(plan.source.config))
    for name in original.missing:
        if families.attention_tensor(loaded, name) is not None and name in original.shapes:
            return f"tensor {name!r} is missing, the config makes it {original.shapes[name]}"
    left_over = (_left_over(name, plan, loaded) for name in original.unexpected)
    return next((told for told in left_over if told is not None), None)


def _left_over(name: str, plan: Plan, loaded: Family) -> str | None:
    """What to say of a tensor that the class has no use for, by its name there: None where it is none of attention's in
    the language model. loaded: the family as its class calls it.
    """
    held = families.attention_tensor(loaded, name)
    stems = {plan.layout.stem, loaded.attention.partition("{}")[0], *loaded.stems}
    if held is None or held.stem not in stems or held.layer >= len(plan.before):
        return None
    if held.suffix not in loaded.attention_tensors:
        return None
    in_files = (plan.layout.stem + name.removeprefix(held.stem), plan.layout.tensor(held.layer, held.suffix))
    record = next((plan.source.tensors[one] for one in in_files if one in plan.source.tensors), None)
    found = f"tensor {record.name!r} is {list(record.shape)}" if record else f"the class reads a tensor as {name!r}"
    attends = plan.before[held.layer].kind != "none"
    wanted = "makes none there" if attends else f"makes layer {held.layer} one without attention"
    return f"{found}, the config {wanted}"


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    peak, check = (resource.getrusage(who).ru_maxrss * unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    status = Path("/proc/self/status")
    if status.exists():  # Linux's ru_maxrss begins with what the process that started this one had
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        peak = int(lines["VmHWM"].split()[0]) * 1024
    return max(peak, check)
