"""Tasks of lm-evaluation-harness through its Python API (extra `headpool[tasks]`)."""

import difflib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headpool.errors import HeadpoolError, RequestError, first_line


@dataclass(frozen=True)
class TaskResult:
    """One metric of one task; `stderr` is None where the harness gives none, `samples` the documents counted."""

    task: str
    metric: str
    value: float
    stderr: float | None
    samples: int


class Tasks:
    """Tasks by name (groups and tags, too) or by a YAML file's path, checked and loaded once for all models.

    Raises RequestError without lm-evaluation-harness, for a name that it does not know, with near ones, and for a task
    that it cannot load.
    """

    def __init__(self, names: Sequence[str]) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise RequestError(
                f"tasks need lm-evaluation-harness ({first_line(error)}): pip install 'headpool[tasks]'"
            ) from error
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        # The index of thousands of tasks takes seconds, which files of one's own can do without.
        self._manager = TaskManager(include_defaults=not all(map(_is_file, names)))
        for name in names:
            _check(name, self._manager.all_tasks)
        try:
            loaded = self._manager.load(list(names))
        except Exception as error:  # data sets and task files fail in a dozen classes of exception
            raise RequestError(f"tasks {', '.join(names)} cannot be loaded: {first_line(error)}") from error
        groups = [loaded["groups"][name] for name in names if name in loaded["groups"]]
        grouped = {task.task_name for group in groups for task in group.get_all_tasks()}
        self._specs = [*groups, *(task for name, task in loaded["tasks"].items() if name not in grouped)]

    def run(self, model: Any, tokenizer: Any, batch_size: int) -> tuple[TaskResult, ...]:
        """Every metric of every task under the harness's own defaults, seeds included.

        Raises HeadpoolError when the harness fails.
        """
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        try:
            found = lm_eval.simple_evaluate(
                model=harness, tasks=self._specs, task_manager=self._manager, log_samples=False
            )
        except Exception as error:  # tasks fail in as many ways as there are authors
            raise HeadpoolError(f"lm-evaluation-harness failed: {first_line(error)}") from error
        return tuple(_results(found))


def _is_file(name: str) -> bool:
    return name.endswith(".yaml") and Path(name).is_file()


def _check(name: str, known: Sequence[str]) -> None:
    if name in known or _is_file(name):
        return
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "`lm-eval ls tasks` lists them"
    raise RequestError(f"no task {name!r} in lm-evaluation-harness, and no such file; {hint}")


def _leaves(found: Any, task: str) -> list[str]:
    """The tasks that a group's figures are made of, or the task itself."""
    if task in found["n-samples"]:
        return [task]
    return [leaf for child in found["group_subtasks"].get(task, ()) for leaf in _leaves(found, child)]


def _results(found: Any) -> list[TaskResult]:
    results = []
    for task, metrics in found["results"].items():
        samples = sum(found["n-samples"][leaf]["effective"] for leaf in _leaves(found, task))
        for key, value in metrics.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filtered}")
            known = isinstance(stderr, int | float) and math.isfinite(stderr)
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            results.append(TaskResult(task, name, float(value), float(stderr) if known else None, samples))
    return results
