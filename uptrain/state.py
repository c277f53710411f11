"""All that a training run must remember, and its way to the disk and back."""

import contextlib
import json
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headpool.destination import sync
from headpool.errors import HeadpoolError, RequestError, first_line
from headpool.uptrain.parallel import Workers
from headpool.uptrain.stream import merge_states

_FACTS = "state.json"
_NAME = re.compile(r"step-(\d+)")


class Data(Protocol):
    """Where batches come from, as far as its position is concerned."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class State:
    """One object that holds all that a checkpoint must hold. The learning-rate schedule is a function of `step`.

    `tokens` counts what was trained on; `best` is the lowest validation perplexity so far, with its step;
    `block_scales` are those of the objective.
    """

    workers: Workers
    data: Data
    step: int = 0
    tokens: int = 0
    best: tuple[float, int] | None = None
    block_scales: list[float] = field(default_factory=list)

    def advance(self, tokens: int) -> None:
        """A step was made on so many tokens."""
        self.step += 1
        self.tokens += tokens

    def state_dict(self) -> dict[str, Any]:
        """`tensors`: model and optimizer for torch.distributed.checkpoint, each process with its part; `facts`: the
        rest in JSON's types, the same in every process. All processes have to ask at once.
        """
        generators = self.workers.gather_objects(_generators())
        position = merge_states(self.workers.gather_objects(self.data.state_dict()))
        facts = {
            "step": self.step, "tokens": self.tokens, "best": self.best, "block_scales": self.block_scales,
            "data": position, "generators": generators,
        }  # fmt: skip
        if self.workers.scaler is not None:
            facts["loss_scale"] = self.workers.scaler.state_dict()
        return {"tensors": self._tensors(), "facts": facts}

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.workers.objective.student, self.workers.plain_optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Everything as it was when `state` was taken, in whatever number of processes."""
        tensors, facts = state["tensors"], state["facts"]
        set_state_dict(
            self.workers.objective.student,
            self.workers.plain_optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )
        self.step, self.tokens, self.block_scales = facts["step"], facts["tokens"], facts["block_scales"]
        self.best = (facts["best"][0], facts["best"][1]) if facts["best"] else None
        self.data.load_state_dict(facts["data"])
        if self.workers.scaler is not None and "loss_scale" in facts:
            self.workers.scaler.load_state_dict(facts["loss_scale"])
        rank = self.workers.accelerator.process_index
        if rank < len(facts["generators"]):
            _set_generators(facts["generators"][rank])


def _generators() -> dict[str, Any]:
    version, keys, position, has_gauss, gauss = np.random.get_state()
    held: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [version, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        held["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return held


def _set_generators(held: Mapping[str, Any]) -> None:
    version, internal, gauss = held["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = held["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(held["torch"]))
    if "cuda" in held and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(held["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


class Shelf:
    """The folder of a run's checkpoints: `step-N` directories, the last `keep` of them and the best.

    `settings` are what a state is only good for: those that change what is computed.
    """

    def __init__(self, folder: Path, *, keep: int, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._keep = keep
        self._settings = json.loads(json.dumps(settings))

    def last(self) -> Path | None:
        """The last checkpoint that is whole: what was being written when its process died has another name."""
        return max(self._whole(), key=_step, default=None)

    def last_good(self) -> str:
        """In words, for messages."""
        last = self.last()
        return f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"

    def _whole(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return [one for one in self._folder.iterdir() if _NAME.fullmatch(one.name) and (one / _FACTS).is_file()]

    def clear(self, *, fresh: bool, finished: bool) -> None:
        """Drop what is there, if `fresh`; or if it is of a `finished` run with other settings. And, always, what killed
        processes left half-done, which takes the room of what is to come.
        """
        dropped = self._folder.with_name(f".{self._folder.name}.old")
        shutil.rmtree(dropped, ignore_errors=True)
        if self._folder.is_dir() and (fresh or (finished and self._is_outdated())):
            self._folder.rename(dropped)  # at once: half a state must not be taken for one
            shutil.rmtree(dropped, ignore_errors=True)
        self._sweep()

    def _is_outdated(self) -> bool:
        last = self.last()
        return last is not None and bool(self._differing(last)) and _is_finished(_read_facts(last))

    def _differing(self, checkpoint: Path) -> list[str]:
        held = _read_facts(checkpoint)["settings"]
        return sorted(key for key in held.keys() | self._settings.keys() if held.get(key) != self._settings.get(key))

    def check(self) -> None:
        """Refuse to go on from a state of other settings: RequestError names those that differ."""
        if (last := self.last()) is None:
            return
        if differ := self._differing(last):
            raise RequestError(
                f"{last} is the state of a run with another {', '.join(differ)}; "
                "go back to those settings to continue it, or pass --fresh to start over"
            )

    def restore(self, state: State) -> Path | None:
        """Load the last checkpoint, if there is one. HeadpoolError where it is not as it was written."""
        if (last := self.last()) is None:
            return None
        facts = _read_facts(last)
        held = state.state_dict()["tensors"]
        alone = state.workers.world == 1
        with _damage_named(last), _without_warnings():
            load(held, storage_reader=FileSystemReader(last), no_dist=alone)
            state.load_state_dict({"tensors": held, "facts": facts["state"]})
        return last

    def save(self, state: State) -> Path:
        """Write a checkpoint beside the others, rename it, drop those that are not kept any more.

        Raises HeadpoolError, on every process, where it could not be written; what there was before is still there.
        """
        accelerator = state.workers.accelerator
        target = self._folder / f"step-{state.step:08d}"
        partial = self._folder / f".{target.name}.partial"
        values = state.state_dict()
        failure: BaseException | None = None
        if accelerator.is_main_process:
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            except OSError as error:
                failure = error
        if any(state.workers.gather_objects(failure is not None)):  # before the others wait for what would not come
            self._give_up(partial, target, failure, main=accelerator.is_main_process)
        try:
            writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
            with _without_warnings():
                save(values["tensors"], storage_writer=writer, no_dist=state.workers.world == 1)
            if accelerator.is_main_process:
                _write_facts(partial, {"settings": self._settings, "state": values["facts"]})
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
                sync(self._folder)
        except (
            Exception,
            CheckpointException,
        ) as error:  # a full disk comes in half a dozen classes; torch's wraps them
            failure = error
        if any(state.workers.gather_objects(failure is not None)):
            self._give_up(partial, target, failure, main=accelerator.is_main_process)
        if accelerator.is_main_process:
            self._prune(state)
        return target

    def _give_up(self, partial: Path, target: Path, failure: BaseException | None, *, main: bool) -> None:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        reason = _reason(failure) if failure else "another process failed"
        free = shutil.disk_usage(next(one for one in self._folder.parents if one.exists())).free / 2**30
        raise HeadpoolError(
            f"{target} could not be written ({reason}; the disk has {free:.2f} GiB free); {self.last_good()}, and the "
            "same command goes on from there"
        ) from failure

    def _prune(self, state: State) -> None:
        kept = sorted(self._whole(), key=_step)[-self._keep :]
        best = state.best[1] if state.best else None
        for one in self._whole():
            if one not in kept and _step(one) != best:
                with contextlib.suppress(OSError):
                    one.rename(one.with_name(f".{one.name}.old"))
        self._sweep()

    def _sweep(self) -> None:
        for dropped in self._folder.glob(".step-*"):
            shutil.rmtree(dropped, ignore_errors=True)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """torch warns of a single process being a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextlib.contextmanager
def _damage_named(checkpoint: Path) -> Iterator[None]:
    """What has become of a checkpoint's files since they were written shows in a dozen classes of exception."""
    try:
        yield
    except HeadpoolError:
        raise
    except (Exception, CheckpointException) as error:
        raise HeadpoolError(
            f"{checkpoint} cannot be restored ({_reason(error)}); if it is damaged, remove it to go on from the one "
            "before, or pass --fresh to start over"
        ) from error


def _reason(failure: BaseException) -> str:
    if isinstance(failure, CheckpointException):
        failure = next(iter(failure.failures.values()))[0]
    lines = [line.strip() for line in str(failure).splitlines()]
    telling = [line for line in lines if "Errno" in line or "Error:" in line or "No space" in line]
    return telling[-1] if telling else f"{type(failure).__name__}: {first_line(failure)}"


def _step(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    assert match
    return int(match[1])


def _is_finished(facts: Mapping[str, Any]) -> bool:
    return bool(facts["state"]["step"] == facts["settings"]["steps"])


def _read_facts(checkpoint: Path) -> dict[str, Any]:
    with _damage_named(checkpoint):
        facts: dict[str, Any] = json.loads((checkpoint / _FACTS).read_text(encoding="utf-8"))
        if not isinstance(facts["settings"], dict) or facts["state"]["step"] != _step(checkpoint):
            raise ValueError(f"{_FACTS} is that of another checkpoint")
    return facts


def _write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    with (folder / _FACTS).open("w", encoding="utf-8") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


@dataclass
class Interval:
    """`save_every`: a number of steps, or a time."""

    text: int | str
    _last: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether it has passed. With a time this is for one process to say."""
        if isinstance(self.text, int):
            return step % self.text == 0
        return time.monotonic() - self._last >= seconds(self.text)

    def restart(self) -> None:
        self._last = time.monotonic()


def seconds(text: str) -> float:
    """Of a time such as 90s, 10min or 2h."""
    number, unit = re.fullmatch(r"([\d.]+)(s|min|h)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]
