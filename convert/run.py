"""One checkpoint in, one checkpoint out: plan, write, check, publish by a rename."""

import contextlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool import __version__, opening
from headpool.card import write_card
from headpool.check import Check, Report
from headpool.checkpoint import PROVENANCE, Source, open_source
from headpool.convert.aligned.options import TEXT, Alignment, Prediction
from headpool.convert.plan import Plan, plan_conversion
from headpool.convert.shards import Progress, write_headers, write_tensors
from headpool.convert.transcode.plan import Transcript, transcribe, work_directory
from headpool.destination import check_destination, check_space, staged
from headpool.errors import HeadpoolError, RequestError
from headpool.headers import read_json_object
from headpool.planning import cache_facts
from headpool.portable import recipe_text
from headpool.text import is_file_name

if TYPE_CHECKING:
    from rich.console import RenderableType

_CONFIG = ".config"
"""Where config.json waits inside the staging directory: until it moves up, nothing there loads."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did: sizes in bytes, times in seconds.

    `layers`: what method aligned found of each; `predictions` and `estimate`: what a dry run of it tells.
    `peak_rss_bytes` is the operating system's figure for the larger of this process and its check. `copied` says that
    the source had `kv_heads` K/V heads already, `transcoded` the model types that it went "from" and "to", if any.
    """

    output: str
    method: str
    source_kv_heads: int
    kv_heads: int
    pooled_tensors: int
    copied: bool
    transcoded: dict[str, str] | None
    dry_run: bool
    output_bytes: int
    seconds: float
    peak_rss_bytes: int
    warnings: tuple[str, ...] = ()
    layers: tuple[dict[str, Any], ...] = ()
    predictions: tuple[Prediction, ...] = ()
    estimate: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> "RenderableType":
        """For a person: what was done in words, and what is predicted as a table."""
        from rich.console import Group

        if self.estimate is None:
            return self._words()
        needed = (f"{self.estimate[f'{what}_bytes'] / 2**30:.2f} GiB of {what}" for what in ("memory", "disk"))
        return Group(self._words(), _table(self.predictions), f"aligning needs at most {' and '.join(needed)}")

    def _words(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        what = f"method {self.method}"
        if self.copied:
            what = "nothing to pool" + ("" if self.transcoded else ": a copy")
        if self.transcoded:
            what = f"{self.transcoded['from']} as {self.transcoded['to']}, {what}"
        result = (
            f"{verb} {self.output}: {self.source_kv_heads} -> {self.kv_heads} K/V heads ({what}), "
            f"{self.pooled_tensors} tensors pooled, {self.output_bytes / 1e9:,.3f} GB in {self.seconds:.1f} s"
        )
        lines = [result, *(f"warning: {warning}" for warning in self.warnings)]
        if not self.copied:
            lines.append("It is not uptrained yet: expect it to be worse than its source until it is.")
        return "\n".join(lines)


def _table(predictions: tuple[Prediction, ...]) -> "RenderableType":
    from rich.table import Table

    table = Table(caption="lost energy, mean over the layers, before refit and healing", caption_justify="left")
    for column in ("K/V heads", "cache bytes/token", "keys lost", "values lost"):
        table.add_column(column, justify="right")
    for one in predictions:
        table.add_row(str(one.kv_heads), f"{one.cache_bytes_per_token:,}", f"{one.keys:.2%}", f"{one.values:.2%}")
    return table


def convert_checkpoint(
    model: str,
    out: Path,
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
    check_destination(out, overwrite=overwrite, source=Path(model) if Path(model).is_dir() else None)
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise RequestError(f"{out} holds no checkpoint, and --overwrite replaces nothing else")
    source = open_source(model, revision)
    alignment = alignment or Alignment()
    work = work_directory(out)
    transcript = transcribe(source, work, wanted=transcode)
    plan = plan_conversion(
        source if transcript is None else transcript.planned,
        kv_heads=kv_heads,
        method=method,
        dtype=dtype if transcript is None else dtype or transcript.dtype,
        max_shard_size=max_shard_size,
        whole_layers=method == "aligned" and alignment.whole_layers,
    )
    check_space(out, plan.nbytes + (0 if transcript is None else transcript.nbytes))
    _check_alignment(plan, alignment)
    if alignment.plot is not None and not (dry_run and plan.method.aligned and alignment.calibration is not None):
        raise RequestError("a plot is made of what a dry run with calibration text predicts")
    warnings: tuple[str, ...] = ()
    predictions: Sequence[Prediction] = ()
    estimate: dict[str, Any] | None = None
    facts: dict[str, Any] = {}
    predicts = dry_run and plan.method.aligned and alignment.calibration is not None and bool(plan.units)
    with _written(transcript, work, transcoding) if predicts or not dry_run else contextlib.nullcontext():
        if not dry_run:
            with _prepared(plan, out, alignment, seed) as (prepared, facts):
                done = provenance(plan, seed, facts, alignment, max_shard_size)
                warnings = _write(plan, out, done, prepared, overwrite=overwrite, seed=seed, progress=progress)
                warnings += _short_of_text(alignment, facts)
        elif predicts:
            from headpool.convert.aligned.predict import predict

            predictions, estimate = predict(plan, alignment, seed)
    return Conversion(
        output=str(out),
        method=method,
        source_kv_heads=plan.source_kv_heads,
        kv_heads=kv_heads,
        pooled_tensors=len(plan.changed),
        copied=not plan.units,
        transcoded=_classes(plan),
        dry_run=dry_run,
        output_bytes=plan.nbytes,
        seconds=time.perf_counter() - begin,
        peak_rss_bytes=_peak_rss_bytes(),
        warnings=warnings,
        layers=tuple(facts.get("layers", ())),
        predictions=tuple(predictions),
        estimate=estimate,
    )


def _check_alignment(plan: Plan, alignment: Alignment) -> None:
    """RequestError for settings that the method does without."""
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
        facts = prepare(plan, alignment, directory, seed)
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
    with staged(out, overwrite=overwrite) as staging:
        (staging / _CONFIG).mkdir()
        (staging / _CONFIG / "config.json").write_text(plan.config_text, encoding="utf-8", newline="")
        write_headers(plan, staging)
        check = Check(staging / _CONFIG, staging)
        try:
            _copy_sidecars(plan.source, staging)
            _write_json(staging / PROVENANCE, done)
            write_card(staging, out.resolve().name, read_json_object(plan.config_text.encode(), "config.json"))
            write_tensors(plan, staging, seed=seed, progress=progress, prepared=prepared)
            inherited = _judge(check.result(), plan.source)
        finally:
            check.kill()
        if inherited:
            _write_json(staging / PROVENANCE, done | {"check": asdict(inherited)})
        (staging / _CONFIG / "config.json").rename(staging / "config.json")
        (staging / _CONFIG).rmdir()
    warnings = opening.warnings(read_json_object(plan.config_text.encode(), "config.json"))
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


def _judge(report: Report, source: Source) -> Report | None:
    """Refuse a result that fits its class less well than the source does; give the faults that both have."""
    if not report:
        return None
    original = Check(source.directory, source.directory).result()
    if original.mismatched:
        raise RequestError(f"weights and config of {source.model} contradict each other: {original.mismatched[0]}")
    if worse := report.beyond(original):
        raise RequestError(f"the result does not fit its class, and was removed: {worse}")
    return report


def _classes(plan: Plan) -> dict[str, str] | None:
    """The model types between which a conversion transcodes."""
    if plan.source.origin is None:
        return None
    return {"from": plan.source.origin.config["model_type"], "to": plan.source.config["model_type"]}


def provenance(
    plan: Plan, seed: int, facts: dict[str, Any], alignment: Alignment, max_shard_size: int | None
) -> dict[str, Any]:
    """headpool.json: what was done, from what, with which versions. It holds no time and no path of this machine.

    facts: what method aligned found: "options", and "layers" with the figures of each layer that it changed.
    """
    figures = {
        one["layer"]: {name: value for name, value in one.items() if name not in ("layer", "seconds")}
        for one in facts.get("layers", ())
    }
    source, to = plan.source, _classes(plan)
    shapes = {name: (record.dtype, record.shape) for name, record in source.tensors.items()}
    config = read_json_object(plan.config_text.encode(), "config.json")
    return {
        "headpool": __version__,
        "method": plan.method.name,
        "kv_heads": plan.kv_heads,
        "source_kv_heads": plan.source_kv_heads,
        "source": (source.origin or source).as_origin(),
        **({} if to is None else {"transcoded": to}),
        "options": {"seed": seed, "dtype": plan.output_dtype, "shards": len(plan.shards), **facts.get("options", {})},
        "cache": {
            "source": cache_facts(source.config, shapes, None if to is None else plan.output_dtype),
            "output": cache_facts(config, shapes, plan.output_dtype),
        },
        "recipe": _recipe(plan, seed, facts, alignment, max_shard_size),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")}
        | {"python": sys.version.split()[0]},
        "layers": [
            {"layer": index, "source_kv_heads": old.kv_heads, "kv_heads": new.kv_heads}
            | _gains(plan, index)
            | figures.get(index, {})
            for index, (old, new) in enumerate(zip(plan.before, plan.after, strict=True))
        ],
        "changed": plan.changed,
        "opens_in": opening.opens_in(config),
        "warnings": list(opening.warnings(config)),
    }


_GAINS = {"mean": "mean of the group's", "first": "the group's first", "random": "ones"}


def _gains(plan: Plan, layer: int) -> dict[str, str]:
    """What became of the gains that norms have for each key head, where the conversion changed them."""
    names = plan.layout.gain_names(layer, plan.after[layer].kv_heads)
    return {"key_gains": _GAINS[plan.method.name]} if set(names) & set(plan.changed_in(layer)) else {}


def _recipe(plan: Plan, seed: int, facts: dict[str, Any], alignment: Alignment, max_shard_size: int | None) -> str:
    """The conversion as a recipe that others can run, with the window that was left to default."""
    source, text = plan.source.origin or plan.source, alignment.calibration
    hashes = {} if source.revision else {source.name: source.headers_sha256()}
    section: dict[str, Any] = {"kv_heads": plan.kv_heads, "method": plan.method.name}
    if plan.source.origin is not None:
        section["transcode"] = True
    if plan.output_dtype is not None:
        section["dtype"] = plan.output_dtype
    if max_shard_size is not None:
        section["max_shard_size"] = str(max_shard_size)
    section |= alignment.recipe() if plan.method.aligned else alignment.text_recipe()
    section |= {key: facts["options"][key] for key in ("calibration_window",) if key in facts.get("options", {})}
    if text is not None and is_file_name(text.name):
        hashes[text.name] = text.sha256
    model = {"model": source.name} | ({"revision": source.revision} if source.revision else {})
    return recipe_text({**model, "seed": seed, "convert": section}, hashes)


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    peak, check = (resource.getrusage(who).ru_maxrss * unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    status = Path("/proc/self/status")
    if status.exists():  # Linux's ru_maxrss begins with what the process that started this one had
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        peak = int(lines["VmHWM"].split()[0]) * 1024
    return max(peak, check)
