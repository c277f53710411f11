"""The same training by headpool, by a bare PyTorch loop and by transformers.Trainer: what the benchmarks compare.

A step's time is the wall clock between the ends of two steps, whatever a contestant does in between (fetching data,
logging, clipping).
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import yaml
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from headpool.recipe import load_recipe
from headpool.uptrain.parallel import default_precision
from headpool.uptrain.run import Uptraining, uptrain
from headpool.uptrain.stream import IGNORED, Batch, Stream

Times = list[float]


@dataclass(frozen=True)
class Race:
    """What is trained, and how: `batch` sequences a step, `micro` of them at a time. `folder` is scratch."""

    model: Path
    data: Path
    folder: Path
    steps: int
    sequence: int
    batch: int
    micro: int

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def batches(self) -> list[Batch]:
        section = load_recipe(str(self.recipe())).uptrain
        assert section is not None
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        stream = Stream(section.data, tokenizer, sequence_length=self.sequence, lanes=self.batch, seed=0)
        return [stream.next() for _ in range(self.steps)]

    def recipe(self) -> Path:
        path = self.folder / "recipe.yaml"
        tokens = self.sequence * self.batch
        section = {
            "data": str(self.data), "tokens": tokens * self.steps, "sequence_length": self.sequence,
            "batch_tokens": tokens, "micro_batch": self.micro, "learning_rate": 1e-3, "schedule": "constant",
        }  # fmt: skip
        path.write_text(yaml.safe_dump({"model": str(self.model), "uptrain": section}))
        return path


class Clock:
    """Notes the time at the end of every step."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def tick(self, *_: object) -> None:
        self._ends.append(time.perf_counter())

    def steps(self) -> Times:
        """Seconds of each step but the first two, which also warm up."""
        return [end - begin for begin, end in zip(self._ends[1:], self._ends[2:], strict=False)]


def headpool(race: Race, *overrides: str) -> tuple[Times, Uptraining, list[str]]:
    """Also what it returned, and the notes that it showed."""
    output = race.folder / "headpool"
    shutil.rmtree(output, ignore_errors=True)
    clock, notes = Clock(), []

    def seen(done: int, total: int, note: str) -> None:
        clock.tick()
        notes.append(note)

    result = uptrain(load_recipe(str(race.recipe()), [f"output={output}", *overrides]), progress=seen)
    return clock.steps(), result, notes


def bare(race: Race, given: list[Batch]) -> Times:
    """What one would write without headpool; the batches are made already."""
    model = AutoModelForCausalLM.from_pretrained(race.model, dtype=torch.float32).to(race.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    half = torch.autocast(race.device, torch.bfloat16, enabled=default_precision() == "bf16")
    clock = Clock()
    for batch in given:
        for at in range(0, race.batch, race.micro):
            part = slice(at, at + race.micro)
            inputs, labels = (one[part].to(race.device) for one in (batch.input_ids, batch.labels))
            with half:
                logits = model(input_ids=inputs, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
            (loss / (race.batch // race.micro)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss.item()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return clock.steps()


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The blocks of the batches, one by one; Trainer's models shift labels themselves."""

    def __init__(self, given: list[Batch]) -> None:
        self._rows = torch.cat([batch.input_ids for batch in given])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Ticks(TrainerCallback):  # type: ignore[misc]
    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick

    def on_step_end(self, *_: object, **__: object) -> None:
        self._tick()


def trainer(race: Race, given: list[Batch]) -> Times:
    """transformers.Trainer set the same: fused AdamW, the same clipping and accumulation, a log line each step."""
    model = AutoModelForCausalLM.from_pretrained(race.model, dtype=torch.float32)
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=str(race.folder / "trainer"), max_steps=len(given), per_device_train_batch_size=race.micro,
        gradient_accumulation_steps=race.batch // race.micro, learning_rate=1e-3, lr_scheduler_type="constant",
        optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=race.device == "cpu",
        bf16=default_precision() == "bf16",
    )  # fmt: skip
    made = Trainer(model=model, args=arguments, train_dataset=Rows(given), callbacks=[Ticks(clock.tick)])
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    return clock.steps()
