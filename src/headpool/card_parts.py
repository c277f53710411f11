"""What stands in each part of a model card, told from headpool.json, report.json and the source's card."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool import geometry
from headpool.checkpoint import SOURCE_CARD
from headpool.columns import Column, columns
from headpool.composite import composites
from headpool.drawing import UNADAPTED, figure
from headpool.planning import format_bytes
from headpool.portable import DATA, inputs
from headpool.text import is_file_name

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

METHODS = {
    "mean": "each group's key heads, and its value heads, averaged",
    "first": "the first key head and value head of each group kept",
    "random": "key and value heads started afresh",
    "aligned": "heads brought to common bases before they are shared",
}

PIPELINES = {"vision_config": "image-text-to-text", "audio_config": "audio-text-to-text"}
"""Of models with such parts beside their language model."""

INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""Metadata that a card takes over from its source's; tags, too."""

LEGAL = re.compile(r"(?i)licen[cs]e|notice|use_policy|copying|copyright")
"""Files that say what is allowed, by how their names begin."""


def base_model(done: Mapping[str, Any]) -> str | None:
    """The hub id of the model that a checkpoint with this headpool.json was made from, None where none is known."""
    source: Any = done.get("source")
    while isinstance(source, Mapping):
        if source.get("revision") is not None:
            return str(source["model"])
        source = source.get("source")
    return None


def source_metadata(directory: Path) -> dict[str, Any]:
    """The metadata of the source's card; empty where there is none, or none that can be read."""
    from huggingface_hub import metadata_load

    path = directory / SOURCE_CARD
    try:
        return (metadata_load(path) if path.is_file() else None) or {}
    except Exception:  # YAML's errors, ValueError, UnicodeDecodeError: a stranger's card may hold anything
        return {}


@dataclass(frozen=True)
class Parts:
    """What the parts of a card are told from."""

    directory: Path
    done: Mapping[str, Any]
    report: Mapping[str, Any] | None
    config: Mapping[str, Any]
    inherited: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        return base_model(self.done)

    @property
    def trained(self) -> Mapping[str, Any] | None:
        held: Mapping[str, Any] | None = self.done.get("uptrain")
        return held

    @property
    def unadapted(self) -> bool:
        """Converted and not trained; a copy with as many K/V heads as before has lost nothing."""
        return self.trained is None and self.done.get("kv_heads") != self.done.get("source_kv_heads")

    @property
    def source_name(self) -> str:
        return self.base or str(self.done.get("source", {}).get("model", "a model"))

    @property
    def kind(self) -> str | None:
        """gqa or mqa; None where each query head has keys and values of its own."""
        layers = [layer for layer in geometry.layers(self.config) if layer.kind != "none"]
        if max(layer.kv_heads for layer in layers) == 1:
            return "mqa"
        return "gqa" if any(layer.kv_heads < layer.heads for layer in layers) else None

    @property
    def name(self) -> str:
        heads = self.done.get("kv_heads")
        short = self.source_name.rsplit("/", 1)[-1]
        return short if heads is None or self.kind is None else f"{short}-{self.kind}{heads if heads > 1 else ''}"

    @property
    def title(self) -> str:
        heads = self.done.get("kv_heads")
        short = self.source_name.rsplit("/", 1)[-1]
        return short if heads is None else f"{short} with {heads} K/V head{'s' if heads > 1 else ''}"

    @property
    def recipe(self) -> str:
        """The whole recipe where one is known, else that of the conversion."""
        held = [self.report or {}, self.trained or {}, self.done]
        return next((str(one["recipe"]) for one in held if one.get("recipe")), "")

    @property
    def composite(self) -> bool:
        """Whether there is more in it than a language model."""
        return self.config.get("model_type") in composites()

    @property
    def pipeline(self) -> str:
        """The hub's word for what goes in and what comes out."""
        if not self.composite:
            return "text-generation"
        return next((word for key, word in PIPELINES.items() if key in self.config), "any-to-any")

    def opening(self) -> dict[str, str]:
        """The classes that open it, and what its inputs go through (empty: nothing beside it does)."""
        if not self.composite:
            there = any(self.directory.glob("tokenizer*"))
            return {"opener": "AutoModelForCausalLM", "preparer": "AutoTokenizer" if there else ""}
        there = any(self.directory.glob("*processor_config.json"))
        opener = next(iter(self.config.get("architectures") or ["AutoModelForImageTextToText"]))
        return {"opener": opener, "preparer": "AutoProcessor" if there else ""}

    def opens(self) -> str:
        """Where checkpoints of this class with fewer K/V heads have been opened."""
        tried = self.done.get("opens_in")
        return f"Checkpoints of this class with fewer K/V heads were opened in {', '.join(tried)}." if tried else ""

    def metadata(self) -> "ModelCardData":
        from huggingface_hub import ModelCardData

        tags = self.inherited.get("tags")
        tags = [str(tag) for tag in tags] if isinstance(tags, list) else [tags] if isinstance(tags, str) else []
        given = {key: self.inherited[key] for key in INHERITED if self.inherited.get(key)}
        results = self._results()
        return ModelCardData(
            **{"pipeline_tag": self.pipeline, "library_name": "transformers", **given},
            base_model=self.base,
            base_model_relation="finetune" if self.base else None,
            datasets=self._datasets() or None,
            tags=list(dict.fromkeys([*tags, *([self.kind] if self.kind else []), "headpool"])),
            model_name=self.name if results else None,
            eval_results=results or None,
        )

    def _datasets(self) -> list[str]:
        """Those on the hub that the recipe names."""
        import yaml

        values = yaml.safe_load(self.recipe) or {}
        return [name for name in inputs(values, DATA) if not is_file_name(name) and "*" not in name]

    @cached_property
    def columns(self) -> list[Column]:
        return columns(self.done, self.report)

    def _results(self) -> list[Any]:
        from huggingface_hub import EvalResult

        if self.report is None:
            return []
        data = self.report["data"]
        name, *parts = str(data["name"]).split(":")
        on_hub = bool(parts) and not is_file_name(name)
        this = self.columns[-1]
        return [
            EvalResult(
                task_type="text-generation",
                dataset_type=name,
                dataset_name=str(data["name"]),
                dataset_config=parts[0] if on_hub and len(parts) > 1 else None,
                dataset_split=parts[-1] if on_hub else None,
                dataset_args={"sha256": data["sha256"]},
                metric_type="perplexity",
                metric_name="Perplexity" if column is this else f"Perplexity ({column.title})",
                metric_value=column.measured["perplexity"],
            )
            for column in reversed(self.columns)
        ]

    def origin(self) -> str:
        linked = f"[{self.base}](https://huggingface.co/{self.base})" if self.base else self.source_name
        done = self.done
        if "method" not in done:
            return f"{linked}, trained further with headpool {done['uptrain']['versions']['headpool']}."
        old, new, written = done["source_kv_heads"], done["kv_heads"], done.get("transcoded")
        if old == new and not written:
            return f"A copy of {linked}, whose attention had {_heads(new)} in each layer already."
        made = []
        if written:
            one, other = written["from"], written["to"]
            made.append(f"a `{one}` model, written as `{other}`, another class that computes the same function")
        if old != new:
            how = METHODS.get(done["method"], "see below")
            made.append(f"converted from {old} to {_heads(new)} in each layer (method `{done['method']}`: {how})")
        return f"{linked}, {' and '.join(made)}, with headpool {done['headpool']}."

    def steps(self) -> Iterator[str]:
        """What followed the conversion, a sentence each."""
        if self.trained is not None and "method" in self.done:
            yield f"Then trained on {self.trained['tokens']:,} tokens in {self.trained['steps']:,} steps."
        first, last = self.columns[:1], self.columns[-1:]
        if self.report is None or not first or first == last:
            return
        old, new = first[0], last[0]
        yield (
            f"Its K/V cache takes {format_bytes(new.bytes_per_token)} per token instead of "
            f"{format_bytes(old.bytes_per_token)}; its perplexity on {self.report['data']['name']} is "
            f"{figure(new.measured['perplexity'])} instead of {figure(old.measured['perplexity'])}."
        )

    def notes(self) -> Iterator[str]:
        """Below the table: where its figures come from, and what else has to be known of them."""
        dtypes = list(dict.fromkeys(one.dtype for one in self.columns))
        yield f"Cache: of one sequence, by the formula, in {' and '.join(dtypes)}."
        if self.report is None:
            yield "Quality was not measured yet. All figures are those of headpool.json."
            return
        data, settings = self.report["data"], self.report["settings"]
        shown = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())
        yield f"Perplexity: {_code(data['name'])} (SHA-256 `{data['sha256']}`), {shown}."
        yield "All figures are those of [report.json](report.json) and [headpool.json](headpool.json)."

    def limits(self) -> list[str]:
        """What an evaluation found that readers of its figures have to know."""
        found = [str(note) for note in self.done.get("warnings", ())]
        found += [] if self.report is None else [str(note) for note in self.report.get("notes", ())]
        return [f"{note[:1].upper()}{note[1:]}" for note in found if UNADAPTED not in note and "prefill" not in note]

    def facts(self) -> Iterator[str]:
        """Sources, settings, seeds, versions and hashes."""
        source, done = self.done.get("source", {}), self.done
        at = f", revision `{source['revision']}`" if source.get("revision") else ""
        digest = f", SHA-256 of config and headers `{source['headers_sha256']}`" if "headers_sha256" in source else ""
        yield f"Source: {_code(str(source.get('model')))}{at}{digest}"
        if "options" in done:
            versions = f"headpool {done['headpool']}, {_settings(done['versions'])}"
            yield f"Conversion: {_settings(done['options'])}; versions: {versions}"
        if (trained := self.trained) is not None:
            shown = {key: value for key, value in trained["options"].items() if isinstance(value, int | float | str)}
            yield f"Uptraining: {trained['tokens']:,} tokens, {trained['steps']:,} steps; {_settings(shown)}"
            if "machine" in trained:
                yield f"Uptraining, machine: {_settings(trained['machine'])}"
            for name, held in trained.get("data", {}).items():
                if isinstance(held, Mapping) and "sha256" in held:
                    yield f"Uptraining, {name}: SHA-256 `{held['sha256']}`"
            yield f"Uptraining, versions: {_settings(trained['versions'])}"
        if self.report is not None:
            yield f"Evaluation, versions: {_settings(self.report['versions'])}"

    def install(self) -> str:
        """The command for the versions that made it. What a version's build is called (+cpu) is not on an index."""
        held = self.trained or self.done
        versions = {"headpool": held.get("headpool"), **held.get("versions", {})}
        wanted = [f"{name}=={str(one).split('+')[0]}" for name, one in versions.items() if one and name != "python"]
        return " ".join(["pip install", *(wanted or ["headpool"])])

    def unpinned(self) -> Iterator[str]:
        """What a recipe cannot hold on to."""
        yield "The machine is not: on another device, with other threads or more processes, last digits differ."
        if self._datasets():
            yield "Nor are data sets on the hub, which may change: compare their hashes with those above."

    def licence(self) -> str:
        files = [path.name for path in sorted(self.directory.iterdir()) if LEGAL.match(path.name)]
        listed = ", ".join(f"[{name}]({name})" for name in files)
        name = self.inherited.get("license_name") or self.inherited.get("license")
        if name is None:
            known = (
                "The original's licence is not named on its card"
                if self.inherited
                else "The original has no card that names a licence"
            )
            return f"{known}{f'; its files: {listed}' if files else ''}. Its terms hold for this model, too."
        return (
            f"The original's licence, {licence_name(name)}, holds for this model, too{f': {listed}' if files else ''}."
        )


def licence_name(value: Any) -> str:
    """Of a card's `license`, which may list several."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _heads(count: int) -> str:
    return f"{count} key/value head{'s' if count > 1 else ''}"


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {_setting(value)}" for key, value in values.items() if value is not None)


def _setting(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) and re.fullmatch("[0-9a-f]{16,}", value) else str(value)


def _code(text: str) -> str:
    return f"`{text}`"
