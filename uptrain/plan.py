"""A training run, whole, before any weight is read: what starts it, what it computes, where it writes."""

import glob
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headpool import families, geometry
from headpool.checkpoint import PROVENANCE, Source, open_source
from headpool.destination import check_destination
from headpool.errors import RequestError
from headpool.family import Family
from headpool.geometry import Layer
from headpool.headers import read_json_object
from headpool.jsonpatch import patch_json
from headpool.planning import cache_facts
from headpool.portable import portable
from headpool.recipe import Recipe
from headpool.sections import FREE, DistillSection, UptrainSection
from headpool.uptrain.loss import Distillation
from headpool.uptrain.parallel import check_machine, default_precision, wants_sharding

DEFAULT_SEQUENCE, DEFAULT_BLOCKS = 2048, 64

_BLOCK, _MOST_BLOCKS = 1 << 16, 4096
"""Bytes that are read of text at once, and how often at most, to identify it."""


@dataclass(frozen=True)
class Plan:
    """Everything about a run that follows from its recipe and its checkpoint's config.

    `config_text` is that of the model to train: of the source, or of what its conversion is going to be. `lanes` is how
    many blocks make a step.
    """

    recipe: Recipe
    section: UptrainSection
    source: Source
    teacher: Source | None
    config_text: str
    family: Family
    layers: tuple[Layer, ...]
    sequence_length: int
    lanes: int
    steps: int
    eval_every: int | None
    output: Path
    work: Path

    @property
    def batch_tokens(self) -> int:
        return self.lanes * self.sequence_length

    @property
    def distillation(self) -> DistillSection | None:
        return self.section.distillation

    @property
    def loss(self) -> Distillation | None:
        held = self.distillation
        return Distillation(held.weight, held.temperature) if held else None

    @property
    def blocks(self) -> float:
        return self.distillation.blocks if self.distillation else 0.0

    def validation_settings(self) -> list[Any]:
        """What a perplexity on the validation text depends on, beside the model."""
        return [self._held_out(), self.section.validation_tokens, self.sequence_length]

    def _held_out(self) -> dict[str, Any] | None:
        held_out = self.section.validation
        return None if held_out is None else _named(held_out.model_dump(mode="json"))

    def settings(self) -> dict[str, Any]:
        """What a state, or a result, was computed with: JSON's types, nothing that only this machine knows."""
        budget = {"tokens", "alpha", "pretraining_tokens"}
        options = self.section.model_dump(mode="json", exclude=FREE | budget)
        return {
            **options,
            "data": [_named(one) for one in options["data"]],
            "validation": self._held_out(),
            "model": [self.source.name, fingerprint(self.source)],
            "teacher": [self.teacher.name, fingerprint(self.teacher)] if self.teacher else None,
            "distill": self.distillation.model_dump() if self.distillation else None,
            "seed": self.recipe.seed,
            "sequence_length": self.sequence_length,
            "batch_tokens": self.batch_tokens,
            "steps": self.steps,
            "eval_every": self.eval_every,
            "precision": self.section.precision or default_precision(),
        }


def _named(text: Mapping[str, Any]) -> dict[str, Any]:
    """A source of text by its files' name and contents, wherever they lie."""
    return {**text, "path": Path(text["path"]).name, "files": text_fingerprint(text["path"])}


def plan_uptraining(recipe: Recipe, *, world: int = 1, made: bool = True, start: Source | None = None) -> Plan:
    """Plan the uptrain section of a recipe for `world` processes.

    Without `made` neither weights nor the recipe's conversion need be there yet: for a dry run, and before a long one.
    `start` is what will be converted where that is not the recipe's model as it is, but transcoded.

    Raises RequestError for what is impossible: no section, no converted checkpoint, sequences longer than the model's
    positions, a batch that cannot be divided, a teacher with another vocabulary or of another shape, sharding where
    layers share weights, what is not installed.
    """
    section = recipe.uptrain
    if section is None:
        raise RequestError("the recipe has no uptrain section")
    check_machine(section)
    root = Path(recipe.output)
    source, config_text = _start(recipe, root, made=made, start=start)
    config = read_json_object(config_text.encode(), "config.json")
    family = families.family_of(config)
    if family.shared_weights and wants_sharding(section):
        raise RequestError(f"layers of {family.model_type} share their weights, which cannot be trained with sharding")
    positions = families.get(config, family, "max_position_embeddings")
    sequence = section.sequence_length or min(positions or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)
    if positions is not None and sequence > positions:
        raise RequestError(f"sequence_length {sequence} is longer than the {positions} positions of {source.model}")
    lanes = _lanes(section, sequence, world)
    steps = max(1, round(section.budget / (lanes * sequence)))
    teacher = _teacher(recipe, section, config, geometry.layers(config), made=made)
    check_destination(root / "uptrained", overwrite=True, source=source.directory)
    return Plan(
        recipe=recipe,
        section=section,
        source=source,
        teacher=teacher,
        config_text=config_text,
        family=family,
        layers=geometry.layers(config),
        sequence_length=sequence,
        lanes=lanes,
        steps=steps,
        eval_every=(section.eval_every or max(1, round(steps / 10))) if section.validation else None,
        output=root / "uptrained",
        work=root / "work" / "uptrain",
    )


def _start(recipe: Recipe, root: Path, *, made: bool, start: Source | None) -> tuple[Source, str]:
    """What training starts from, and its config."""
    directory = root / "converted"
    if recipe.convert is None:
        source = open_source(recipe.model, recipe.revision, weights=made)
        return source, source.config_text
    known_by_its_result = recipe.convert.transcode and start is None
    if (made or known_by_its_result) and directory.is_dir():
        source = open_source(str(directory))
        return source, source.config_text
    if made or known_by_its_result:
        raise RequestError(f"{directory} is not there: `headpool run` converts, and goes on to uptrain")
    source = start or open_source(recipe.model, recipe.revision, weights=False)
    geometry.regroup(geometry.layers(source.config), recipe.convert.kv_heads)  # refuses what does not divide
    changes = families.kv_heads_changes(source.config, recipe.convert.kv_heads)
    return source, patch_json(source.config_text, changes)


def _lanes(section: UptrainSection, sequence: int, world: int) -> int:
    tokens = section.batch_tokens or DEFAULT_BLOCKS * sequence
    if tokens % (sequence * world):
        per = f"{sequence}" + (f" x {world} processes" if world > 1 else "")
        raise RequestError(f"batch_tokens {tokens} is no multiple of sequence_length {per} = {sequence * world}")
    return tokens // sequence


def _teacher(
    recipe: Recipe, section: UptrainSection, config: Mapping[str, Any], layers: tuple[Layer, ...], *, made: bool
) -> Source | None:
    wanted = section.distillation
    if wanted is None:
        return None
    teacher = open_source(section.teacher or recipe.model, None if section.teacher else recipe.revision, weights=made)
    family = families.find_family(teacher.config)
    sizes = ["vocab_size"] + (["hidden_size"] if wanted.blocks else [])
    for field in sizes:
        theirs = families.get(teacher.config, family, field)
        ours = families.get(config, families.find_family(config), field)
        if theirs != ours:
            raise RequestError(f"the teacher {teacher.model} has {field} {theirs}, the model {ours}")
    theirs = len(geometry.layers(teacher.config))
    if wanted.blocks and theirs != len(layers):
        raise RequestError(f"distill.blocks: the teacher {teacher.model} has {theirs} layers, the model {len(layers)}")
    return teacher


def fingerprint(source: Source) -> str:
    """Identifies a checkpoint by its headers, its provenance, and some bytes from the middle of each tensor."""
    digest = hashlib.sha256(source.headers_sha256().encode())
    provenance = source.directory / PROVENANCE
    if provenance.is_file():
        digest.update(provenance.read_bytes())
    for record in source.tensors.values():
        with record.path.open("rb") as file:
            file.seek(record.offset + record.nbytes // 2)
            digest.update(file.read(min(64, record.nbytes - record.nbytes // 2)))
    return digest.hexdigest()


def text_fingerprint(pattern: str) -> str | None:
    """Identifies the local files that a path or a pattern names, by sizes and contents, of large ones by blocks from
    all over them. None for a data set on the hub, and where nothing is there.
    """
    files = local_files(pattern)
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        count = min(max(1, _MOST_BLOCKS // len(files)), -(-size // _BLOCK))
        with path.open("rb") as file:
            for number in range(count):
                file.seek(max(0, size - _BLOCK) * number // max(1, count - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest() if files else None


def local_files(pattern: str) -> list[Path]:
    """The files that a path or a pattern names, none for a data set on the hub."""
    named = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    return [one for name in named if (one := Path(name)).is_file()]


def provenance(plan: Plan, details: Mapping[str, Any]) -> dict[str, Any]:
    """headpool.json of the result: the source's, extended by what training did."""
    source = plan.source
    held = source.provenance
    if held is None or source.revision is not None:  # of what came from the hub, a reader finds the rest there
        shapes = {name: (record.dtype, record.shape) for name, record in source.tensors.items()}
        cache = cache_facts(source.config, shapes)
        held = {"source": source.as_origin(), "cache": {"source": cache, "output": cache}}
    made = {**held, "uptrain": details}
    return {**held, "uptrain": {**details, "recipe": portable(plan.recipe, made)}}
