"""What the sections of a recipe have in common, and the one for uptraining."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSource(Section):
    """Where training text comes from."""

    path: str = Field(description="a .txt, .jsonl or .parquet file, compressed or not, a glob of such, or a hub id")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(1.0, description="share of tokens in a mixture")
    config: str | None = Field(None, description="configuration of a data set on the hub")
    split: str = Field("train", description="split of a data set on the hub")
    text_column: str = Field("text", description="the column that holds the text")
    messages_column: str | None = Field(
        None, description="the column that holds conversations, for the tokenizer's chat template; instead of text"
    )
    streaming: bool = Field(False, description="read on the way, with nothing kept on the disk")


def _data_sources(value: Any) -> Any:
    """The short forms that a recipe may use: a path, one mapping, or a list of either."""
    values = value if isinstance(value, list) else [value]
    return [{"path": one} if isinstance(one, str) else one for one in values]


class HeldOutText(Section):
    """Text to measure on while training."""

    path: str = Field(description="a .txt, .jsonl or .parquet file, compressed or not, or a hub id")
    config: str | None = Field(None, description="configuration of a data set on the hub")
    split: str = Field("validation", description="split of a data set on the hub")
    text_column: str = Field("text", description="the column that holds the text")


_HeldOut = str | HeldOutText | None


def _held_out(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


_OneOrMore = str | DataSource | Annotated[list[str | DataSource], Field(min_length=1)]

DataSources = Annotated[
    tuple[DataSource, ...], Field(min_length=1), BeforeValidator(_data_sources, json_schema_input_type=_OneOrMore)
]
"""For `data` of a section that trains: after validation always a tuple of DataSource."""


Fraction = Annotated[float, Field(ge=0, le=1)]


class ScheduleSection(Section):
    """The learning rate over the steps; a recipe may also hold the shape alone, as in `schedule: cosine`."""

    shape: Literal["constant", "cosine", "wsd"] = Field("cosine", description="wsd: warm-up, stable, decay")
    warmup: Annotated[float, Field(ge=0, lt=1)] = Field(0.05, description="share of the steps in which the rate rises")
    final: Fraction = Field(0.1, description="of the peak, in the last step of cosine and wsd")
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="share of the steps after the warm-up in which wsd falls, linearly"
    )


class DistillSection(Section):
    """How much is learned from the teacher."""

    weight: Fraction = Field(0.5, description="share of the loss that is KL from the teacher's predictions")
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="of both predictions before they are compared"
    )
    blocks: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="weight of the attention blocks' squared distance from the teacher's, summed over layers"
    )


FREE = {"save_every", "keep", "micro_batch", "gradient_checkpointing", "compile", "sharding", "trackers", "launch"}
"""Keys of an uptrain section that do not decide what is computed, beyond rounding: they may change between attempts."""


_Schedule = Literal["constant", "cosine", "wsd"] | ScheduleSection


def _schedule(value: Any) -> Any:
    return {"shape": value} if isinstance(value, str) else value


def _interval(value: Any) -> Any:
    good = re.fullmatch(r"\d+(\.\d+)?(s|min|h)", value) if isinstance(value, str) else type(value) is int and value > 0
    if not good:
        raise ValueError(f"{value!r} is neither a number of steps nor a time such as 90s, 10min or 2h")
    return value


_Time = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(s|min|h)$")]

Interval = Annotated[Positive | str, BeforeValidator(_interval, json_schema_input_type=Positive | _Time)]
"""A number of steps, or a time: 90s, 10min, 2h."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class UptrainSection(Section):
    """What `headpool uptrain` does with the converted checkpoint."""

    data: DataSources = Field(
        description="text to train on: a path, a glob or a hub id, or a list of them with weights"
    )
    tokens: Positive | None = Field(None, description="how many tokens to train on, rounded to whole steps")
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="the same as a share of pretraining_tokens"
    )
    pretraining_tokens: Positive | None = Field(None, description="what the original was pretrained on, for alpha")
    sequence_length: Annotated[int, Field(ge=2)] | None = Field(
        None, description="tokens of a block; default: the model's positions, at most 2048"
    )
    batch_tokens: Positive | None = Field(None, description="tokens of an optimizer step; default: 64 blocks")
    micro_batch: Positive = Field(8, description="blocks that a device holds at a time")
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(1e-4, description="at its peak")
    schedule: Annotated[ScheduleSection, BeforeValidator(_schedule, json_schema_input_type=_Schedule)] = Field(
        ScheduleSection.model_validate({}), description="of the learning rate: a shape, or a mapping"
    )
    optimizer: Literal["adamw", "adafactor"] = Field("adamw", description="adafactor: less memory")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="of adamw")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="of matrices; vectors have none"
    )
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        1.0, description="largest norm of the gradient; null: any"
    )
    train: Literal["all", "attention", "kv"] = Field("all", description="which weights")
    teacher: str | None = Field(
        None, description="checkpoint to distill from; default with distill: the recipe's model"
    )
    distill: DistillSection | None = Field(None, description="learn from the teacher; absent without a teacher")
    document_attention: bool = Field(False, description="keep attention inside each document")
    precision: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="of computing; default: bf16 on a GPU, fp32 on a CPU; weights are float32 always"
    )
    gradient_checkpointing: bool = Field(False, description="less memory for a third more computing")
    compile: bool = Field(False, description="torch.compile")
    attention: Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"] = Field(
        "sdpa", description="the attention kernel; flash ones need headpool[gpu]"
    )
    liger: bool = Field(
        False, description="liger-kernel's fused norms, rotary embeddings and MLPs; needs headpool[gpu]"
    )
    sharding: Literal["none", "full"] = Field(
        "none", description="full: every process holds a part of the weights (FSDP2)"
    )
    save_every: Interval = Field("10min", description="steps or time between checkpoints of the training state")
    keep: Positive = Field(2, description="how many of them are kept, beside the best")
    validation: Annotated[HeldOutText | None, BeforeValidator(_held_out, json_schema_input_type=_HeldOut)] = Field(
        None, description="text for validation perplexity: a path, a hub id, or a mapping with its column"
    )
    validation_tokens: Positive = Field(65536, description="how much of it is used")
    eval_every: Positive | None = Field(None, description="steps between validations; default: a tenth of all")
    trackers: tuple[str, ...] = Field((), description="accelerate's trackers by name, such as tensorboard or wandb")
    launch: dict[str, str | int | float | bool] | None = Field(
        None, description="options of `accelerate launch`, with which `headpool run` starts this stage"
    )

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if (self.tokens is None) == (self.alpha is None):
            given = "neither is there" if self.tokens is None else "both are there"
            raise ValueError(f"give either tokens, or alpha with pretraining_tokens; {given}")
        if self.alpha is not None and self.pretraining_tokens is None:
            raise ValueError("alpha is a share of pretraining_tokens, which is missing")
        if self.sharding == "full" and self.optimizer == "adafactor":
            raise ValueError("PyTorch's Adafactor does not work on sharded weights; choose optimizer: adamw")
        if self.eval_every is not None and self.validation is None:
            raise ValueError("eval_every needs text to validate on: validation")
        if not isinstance(self.processes, int) or self.processes < 1:
            raise ValueError(f"launch.num_processes: a number of processes was expected, found {self.processes!r}")
        return self

    @property
    def processes(self) -> int:
        """How many `launch` asks for, as far as it says so itself."""
        return (self.launch or {}).get("num_processes", 1)  # type: ignore[return-value]  # checked above

    @property
    def budget(self) -> int:
        """Tokens to train on."""
        if self.tokens is not None:
            return self.tokens
        assert self.alpha is not None
        assert self.pretraining_tokens is not None
        return round(self.alpha * self.pretraining_tokens)

    @property
    def distillation(self) -> DistillSection | None:
        """With its default where there is only a teacher."""
        return self.distill or (DistillSection.model_validate({}) if self.teacher is not None else None)
