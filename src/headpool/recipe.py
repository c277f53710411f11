"""A recipe: one strict YAML file, `key=value` from the command line on top, all errors reported together."""

import glob
import shutil
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from headpool.defaults import CALIBRATION_TOKENS, HEAL_RATE, HEAL_STEPS
from headpool.errors import RequestError, did_you_mean
from headpool.geometry import parse_size
from headpool.sections import Positive, Section, UptrainSection

_ACCELERATE = "accelerate"
"""The folder beside the recipes that holds configs for `accelerate launch`."""

Dtype = Literal["float64", "float32", "float16", "bfloat16"]


def _size(text: str) -> str:
    try:
        parse_size(text)
    except RequestError as error:
        raise ValueError(str(error)) from error
    return text


Size = Annotated[str, AfterValidator(_size)]


class ConvertSection(Section):
    """What `headpool convert` would be told."""

    kv_heads: Positive = Field(description="K/V heads per layer of the result")
    method: Literal["mean", "first", "random", "aligned"] = Field(
        "mean", description="how the heads of a group become one"
    )
    calibration: str | None = Field(
        None, description="for aligned, and for norms with gains for every key head: text like the training data"
    )
    text_column: str = Field("text", description="the column of `calibration` that holds the text")
    calibration_tokens: Positive = Field(CALIBRATION_TOKENS, description="how many of its tokens are used")
    calibration_window: Positive | None = Field(
        None, description="tokens per window; default: half the model's positions, at most 2048"
    )
    groups: Literal["search", "contiguous"] = Field("search", description="for aligned: which heads share")
    refit: bool = Field(True, description="for aligned: refit the output projection")
    heal: Annotated[int, Field(ge=0)] = Field(HEAL_STEPS, description="for aligned: steps of healing for each layer")
    heal_scope: Literal["layer", "attention"] = Field("layer", description="for aligned: what is healed")
    heal_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        HEAL_RATE, description="for aligned: of healing, at its peak, relative to the size of what is trained"
    )
    device: str | None = Field(None, description="for calibration; default: a GPU where there is one")
    dtype: Dtype | None = Field(None, description="dtype of the result; default: as the source")
    transcode: bool = Field(
        False, description="where its class cannot hold fewer K/V heads: as another of the same function, first"
    )
    max_shard_size: Size | None = Field(None, description="such as 5GB; default: the source's division")

    @model_validator(mode="after")
    def _aligned_only(self) -> Self:
        others = {"kv_heads", "method", "transcode", "dtype", "max_shard_size"}
        if self.calibration is not None and self.method in ("mean", "first"):  # for gains, where the model has them
            others |= {"calibration", "text_column", "calibration_tokens", "calibration_window", "device"}
        if self.method != "aligned" and (given := sorted(self.model_fields_set - others)):
            raise ValueError(f"{', '.join(given)}: for method aligned, not for {self.method}")
        return self


class EvalSection(Section):
    """What `headpool eval` would be told, with the original as the baseline."""

    data: str = Field(description="a .txt, .jsonl or .parquet file, compressed or not, or a data set on the hub")
    data_config: str | None = Field(None, description="configuration of a data set on the hub")
    split: str = Field("test", description="split of a data set on the hub")
    text_column: str = Field("text", description="the column that holds the text")
    window: Positive | None = Field(None, description="tokens per window; default: the model's positions, at most 2048")
    stride: Positive | None = Field(None, description="tokens between windows; default: the window")
    batch_size: Positive = Field(8, description="windows per forward pass")
    dtype: Dtype | Literal["auto"] | None = Field(
        None, description="auto: the checkpoint's; default: float32 on a CPU, auto on a GPU"
    )
    device: str | None = Field(None, description="such as cpu or cuda:0; default: a GPU where there is one")
    contexts: tuple[Annotated[int, Field(ge=2)], ...] = Field((), description="tokens in the cache to time decoding at")
    batches: tuple[Positive, ...] = Field((1,), min_length=1, description="sequences decoded at a time")
    tasks: tuple[str, ...] = Field((), description="tasks of lm-evaluation-harness, or their YAML files")
    prompts: tuple[str, ...] | None = Field(None, description="continued greedily; default: beginnings in the data")

    @model_validator(mode="after")
    def _stride_within_window(self) -> Self:
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise ValueError(f"stride {self.stride} is larger than window {self.window}: tokens would be left out")
        return self


class Recipe(Section):
    """A whole run. `model` and data are relative to the recipe's file, `output` to the current directory."""

    model: str = Field(description="a checkpoint directory or a hub id")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    output: str = Field(description="directory for everything that the run makes; default: headpool-out/NAME")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of method random and of the order of text")
    convert: ConvertSection | None = Field(None, description="absent: the model is evaluated or trained as it is")
    eval: EvalSection | None = Field(None, description="absent: nothing is measured")
    uptrain: UptrainSection | None = Field(None, description="absent: nothing is trained")

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.convert is None and self.uptrain is None:
            raise ValueError("neither a convert section nor an uptrain section: nothing to run")
        return self

    def to_yaml(self) -> str:
        """The recipe with what was overridden, and without what is at its default, as text for a recipe's file."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)


def load_recipe(recipe: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file or by the name of a shipped one, and apply `overrides` ("convert.kv_heads=4").

    Raises RequestError with all errors at once; an unknown key comes with the nearest known one.
    """
    path = find_recipe(recipe)
    values = _read_yaml(path)
    problems = [problem for override in overrides if (problem := _apply(values, override))]
    values.setdefault("output", str(Path("headpool-out") / path.stem))
    try:
        parsed = Recipe.model_validate(values)
    except ValidationError as error:
        problems += [_explain(one) for one in error.errors()]
    if problems:
        raise RequestError("\n".join([f"{path.name}: {len(problems)} error(s)", *(f"  {one}" for one in problems)]))
    return _resolved(parsed, path.parent)


def recipe_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe's file, for editors. What spans several keys is beyond it."""
    schema: dict[str, Any] = _with_grouped_digits(Recipe.model_json_schema(mode="validation"))
    schema["required"] = [key for key in schema["required"] if key != "output"]  # the file's name is its default
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "headpool recipe"}


def _with_grouped_digits(schema: Any) -> Any:
    """A schema for which 2_000 is a whole number, as for PyYAML (YAML 1.1): to editors, by YAML 1.2, it is a text."""
    if isinstance(schema, list):
        return [_with_grouped_digits(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_grouped_digits(value) for key, value in schema.items()}
    if found.get("type") == "integer":
        found |= {"type": ["integer", "string"], "pattern": "^[1-9][0-9]*(_[0-9]+)+$"}
    return found


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with headpool, by name: FOLDER/FILE without its suffix."""
    root = _shipped()
    found = sorted(path for path in root.glob("*/*.yaml") if path.parent.name != _ACCELERATE)
    return {str(path.relative_to(root).with_suffix("")): path for path in found}


def _shipped() -> Path:
    return Path(str(resources.files("headpool.recipes")))


def find_recipe(recipe: str) -> Path:
    """The file of a recipe: a path, the name of a shipped one, or a folder of shipped ones that holds just one.

    Raises RequestError that lists the shipped ones.
    """
    if Path(recipe).is_file():
        return Path(recipe)
    shipped = shipped_recipes()
    named = [path for name, path in shipped.items() if recipe in (name, name.split("/")[0])]
    if len(named) == 1:
        return named[0]
    hint = did_you_mean(recipe, shipped)
    raise RequestError(f"no recipe {recipe!r}: neither a file nor one of {', '.join(shipped)}{hint}")


def copy_recipe(recipe: str, folder: Path) -> Path:
    """Copy a shipped recipe's folder, or the folder of that name, with what lies in it, into `folder`; returns the new
    path of the recipe, or of the folder where that holds several.

    Raises RequestError when there is no such recipe or its folder exists already.
    """
    several = [name for name in shipped_recipes() if name.startswith(f"{recipe}/")][1:] or recipe == _ACCELERATE
    path = _shipped() / recipe if several else find_recipe(recipe)
    source = path if several else path.parent
    target = folder / source.name
    if target.exists():
        raise RequestError(f"{target} exists")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    return target if several else target / path.name


class _UniqueKeys(yaml.SafeLoader):
    """YAML says that keys are unique, PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            keys = [self.construct_object(key) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return mapping


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"{path}: not a recipe ({error})") from error
    if not isinstance(values, dict):
        raise RequestError(f"{path}: not a recipe (a mapping was expected)")
    return values


def _apply(values: dict[str, Any], override: str) -> str | None:
    """Set one dotted key. Returns what is wrong with the override, if anything."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        return f"{override!r} is not of the form key=value"
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return f"{key}: {section} is no section"
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        return f"{key}: {text!r} is not a YAML value"
    return None


def _explain(error: Any) -> str:
    location = error["loc"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    if error["type"] == "extra_forbidden":
        known = _fields(location[:-1])
        return f"unknown key {key}" + (did_you_mean(str(location[-1]), known) or f"; known are {', '.join(known)}")
    if error["type"] == "missing":
        return f"missing key {key}"
    if error["type"] == "value_error":
        return f"{key or 'recipe'}: {error['ctx']['error']}"
    return f"{key}: {error['msg'].lower()}, found {error['input']!r}"


def _fields(location: Sequence[str | int]) -> list[str]:
    """The keys of a section, or of an entry of a list, by its number there."""
    model: type[BaseModel] = Recipe
    for section in (part for part in location if isinstance(part, str)):
        annotation = model.model_fields[section].annotation
        candidates = (annotation, *getattr(annotation, "__args__", ()))
        model = next(one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel))
    return list(model.model_fields)


def _resolved(recipe: Recipe, folder: Path) -> Recipe:
    """With inputs that exist beside the recipe as paths that hold from anywhere; others are hub ids."""

    def resolve(value: str) -> str:
        local = folder / Path(value).expanduser()
        return str(local) if local.exists() or glob.glob(str(local), recursive=True) else value  # noqa: PTH207

    calibration = recipe.convert and recipe.convert.calibration
    convert = recipe.convert and recipe.convert.model_copy(update={"calibration": calibration and resolve(calibration)})
    evaluation = recipe.eval and recipe.eval.model_copy(
        update={
            "data": resolve(recipe.eval.data),
            "tasks": tuple(resolve(task) if task.endswith(".yaml") else task for task in recipe.eval.tasks),
        }
    )
    return recipe.model_copy(
        update={
            "model": resolve(recipe.model),
            "convert": convert,
            "eval": evaluation,
            "uptrain": _with_paths(recipe.uptrain, resolve),
        }
    )


def _with_paths(section: UptrainSection | None, resolve: Callable[[str], str]) -> UptrainSection | None:
    if section is None:
        return None
    data = tuple(source.model_copy(update={"path": resolve(source.path)}) for source in section.data)
    held_out = section.validation
    return section.model_copy(
        update={
            "data": data,
            "teacher": section.teacher and resolve(section.teacher),
            "validation": held_out and held_out.model_copy(update={"path": resolve(held_out.path)}),
        }
    )
