"""lm-evaluation-harness: a local task through it, its rolling log-likelihood beside `score`. No network."""

import json
import math
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import tiny
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from headpool.errors import RequestError
from headpool.eval.measure import evaluate
from headpool.eval.models import ModelSpec
from headpool.eval.report import as_json
from headpool.eval.tasks import Tasks
from headpool.score import Window, score
from headpool.text import TextData

TEXT = tiny.NOVEL.read_text(encoding="utf-8")[200:3200]
QUESTIONS = [
    {"question": f"It was the {word}", "choices": ["house", "xqz", "of"], "answer": number % 3}
    for number, word in enumerate(["best", "worst", "end", "morning", "lady"])
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("task")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    values = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "questions.yaml").write_text(yaml.safe_dump(values))
    return str(folder / "questions.yaml")


def accuracy(path: str | Path) -> float:
    """The choice that the stock class finds likeliest, one forward pass a choice."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    right = 0
    for row in QUESTIONS:
        likelihoods = []
        for choice in row["choices"]:  # type: ignore[attr-defined]
            head = tokenizer(str(row["question"]), add_special_tokens=False)["input_ids"]
            tail = tokenizer(f" {choice}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                log_p = model(torch.tensor([head + tail])).logits[0].log_softmax(-1)
            likelihoods.append(sum(log_p[len(head) - 1 + at, token].item() for at, token in enumerate(tail)))
        right += likelihoods.index(max(likelihoods)) == row["answer"]
    return right / len(QUESTIONS)


def test_a_local_task_before_and_after(task: str, tmp_path: Path) -> None:
    other = tiny.checkpoint(tmp_path / "model", tokenizer=True, vocab_size=2048)
    specs = [ModelSpec("baseline", str(tiny.QUICKSTART)), ModelSpec("model", str(other))]
    report = as_json(evaluate(specs, TextData([TEXT[:200]], "0" * 64, "t"), tasks=[task], prompts=[], dtype="float32"))
    for spec, model in zip(specs, report["models"], strict=True):
        p = accuracy(spec.path)
        assert model["tasks"] == [
            {
                "task": "questions",
                "metric": "acc",
                "value": pytest.approx(p),
                "stderr": pytest.approx(math.sqrt(p * (1 - p) / (len(QUESTIONS) - 1))),
                "samples": len(QUESTIONS),
            }
        ]


def test_unknown_tasks_are_refused_with_near_names(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the tasks of a small folder: reading the harness's own index takes many seconds."""
    manager = lm_eval.tasks.TaskManager(include_path=str(Path(task).parent), include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: manager)
    with pytest.raises(RequestError, match=r"^no task 'question' .*did you mean questions\?$"):
        Tasks(["question"])
    with pytest.raises(RequestError, match=r"^no task 'xqz' .*`lm-eval ls tasks` lists them$"):
        Tasks(["xqz"])
    Tasks(["questions"])


def test_a_task_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("task: [broken\n")
    with pytest.raises(RequestError, match="cannot be loaded"):
        Tasks([str(tmp_path / "broken.yaml")])


@pytest.mark.parametrize(("window", "batch"), [(64, 1), (100, 3), (512, 8)])
def test_nats_are_those_of_the_rolling_log_likelihood_over_the_same_windows(window: int, batch: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.QUICKSTART, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny.QUICKSTART)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=window)
    request: Any = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(TEXT,), idx=0)
    (expected,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
    tokens = [harness.prefix_token_id, *tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    # Its windows feed `window` tokens each; the last reaches back to be as long as the others.
    ends = [*range(window, len(tokens) - 1, window), len(tokens) - 1]
    windows = [
        Window(max(0, end - window), end + 1, max(1, previous + 1))
        for previous, end in zip([0, *ends], ends, strict=False)
    ]
    found = score(model, [tokens], [windows], batch)
    assert found.tokens == len(tokens) - 1
    assert found.nats == pytest.approx(-expected, rel=1e-5)


def test_a_group_gives_the_figures_of_its_tasks_and_their_mean(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(task).parent
    group = {"group": "both", "task": ["questions"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "both.yaml").write_text(yaml.safe_dump(group))
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: manager)
    model = AutoModelForCausalLM.from_pretrained(tiny.QUICKSTART, dtype=torch.float32)
    found = Tasks(["both"]).run(model, AutoTokenizer.from_pretrained(tiny.QUICKSTART), 2)
    p = accuracy(tiny.QUICKSTART)
    assert sorted((one.task, one.samples) for one in found) == [("both", len(QUESTIONS)), ("questions", len(QUESTIONS))]
    assert all(one.value == pytest.approx(p) for one in found)
