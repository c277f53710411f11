"""Perplexity against lm-evaluation-harness and against the bare forward pass: ratios from one run, and peak memory.

    python benchmarks/eval.py [--tokens 16384] [--window 512] [--batch-size 8] [--runs 3]

Scores the same text by the same windows with the bundled model, and a quarter of it with a synthetic llama of 6 layers,
hidden size 512 and a vocabulary of 32,000, in four ways that take turns: headpool; the harness's rolling log-likelihood
at its default batch size (1) and at headpool's; and the stock class's forward pass alone, which gives logits and scores
nothing. Tokenizing counts for all. The bundled model also scores the text by sentence, as a data set of short texts.
Then, each in a process of its own, the memory that scoring takes beyond the loaded model's, for growing windows, beside
that of the forward pass.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart"
VOCABULARY = 32_000
SENTENCE_END = r"(?<=[.!?])\s+"
MEMORY_WINDOWS, MEMORY_BATCH = (256, 512, 1024), 8


def make_model(folder: Path) -> None:
    """A random llama with the bundled model's tokenizer, whose tokens are the first of its vocabulary."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(RECIPE / "model").save_pretrained(folder)


def load(folder: str | Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def excerpt(tokenizer: Any, tokens: int) -> str:
    """The beginning of a novel, in so many tokens."""
    text = (RECIPE / "test.txt").read_text(encoding="utf-8")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text[: offsets[tokens - 1][1]]


def rolling_windows(n: int, window: int) -> list[Any]:
    """The harness's windows over BOS and n tokens, in headpool's terms: `window` inputs each, the last one reaching
    back as far as it takes to be as long as the others.
    """
    from headpool.score import Window

    ends = [*range(window, n, window), n]
    return [Window(max(0, end - window), end + 1, 1 + begin) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def methods(
    model: Any, tokenizer: Any, texts: Sequence[str], window: int, batch: int
) -> dict[str, Callable[[], float | None]]:
    """The four ways, each giving the nats of the texts or None where it has none."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from headpool.score import score

    def tokens() -> list[list[int]]:
        return [[0, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]] for text in texts]

    def headpool() -> float:
        sequences = tokens()
        return score(model, sequences, [rolling_windows(len(one) - 1, window) for one in sequences], batch).nats

    def harness(rows: int) -> float:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=rows, max_length=window)
        requests = [Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0) for text in texts]
        return -sum(map(float, lm.loglikelihood_rolling(requests, disable_tqdm=True)))

    @torch.inference_mode()
    def forward() -> None:
        rows = [one[w.start : w.end - 1] for one in tokens() for w in rolling_windows(len(one) - 1, window)]
        rows.sort(key=len, reverse=True)
        for at in range(0, len(rows), batch):
            together = rows[at : at + batch]
            padded = [row + [0] * (len(together[0]) - len(row)) for row in together]
            model(input_ids=torch.tensor(padded), use_cache=False)

    return {
        "headpool": headpool,
        "lm-eval, batch size 1": lambda: harness(1),
        f"lm-eval, batch size {batch}": lambda: harness(batch),
        "forward pass alone": forward,
    }


def compare(
    name: str, folder: str | Path, tokens: int, options: argparse.Namespace, *, sentences: bool = False
) -> None:
    model, tokenizer = load(folder)
    window = min(options.window, model.config.max_position_embeddings)
    text = excerpt(tokenizer, tokens)
    texts = re.split(SENTENCE_END, text) if sentences else [text]
    ways = methods(model, tokenizer, texts, window, options.batch_size)
    nats = {way: run() for way, run in ways.items()}  # warms up, too
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.runs):
        for way, run in ways.items():
            begin = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - begin)
    print(f"{name}: {tokens:,} tokens in {len(texts)} texts, window {window}, batch size {options.batch_size}")
    for way, held in seconds.items():
        rate = tokens / statistics.median(held)
        print(f"  {way}: {rate:,.0f} tokens/s ({', '.join(f'{one:.2f}' for one in held)} s)")
    median = {way: statistics.median(held) for way, held in seconds.items()}
    ours, one, equal, bare = ways
    print(f"  speed, headpool / lm-eval at batch size 1: {median[one] / median[ours]:.2f} (goal: at least 2)")
    print(f"  speed, headpool / lm-eval at equal batch size: {median[equal] / median[ours]:.2f} (goal: at least 1)")
    print(f"  speed, headpool / forward pass alone: {median[bare] / median[ours]:.2f} (goal: at least 0.9)")
    for way in (one, equal):
        apart = abs((nats[ours] or 0) / (nats[way] or 1) - 1)
        print(f"  nats, headpool against {way}: {apart:.1e} apart (goal: at most 1e-5)")


def memory(folder: str, way: str, window: int) -> None:
    """Print by how many bytes scoring raises this process's peak above that of the loaded model."""
    model, tokenizer = load(folder)
    sequence = MEMORY_BATCH * window
    run = methods(model, tokenizer, [excerpt(tokenizer, sequence)], window, MEMORY_BATCH)[way]
    model(input_ids=model.dummy_inputs["input_ids"][:1, :2])
    before = peak()
    run()
    print(peak() - before)


def peak() -> int:
    """Of this process's own memory: what the kernel counts in ru_maxrss a child inherits from its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def compare_memory(folder: Path, windows: Sequence[int]) -> None:
    print(f"memory beyond the model's, vocabulary {VOCABULARY:,}, batch size {MEMORY_BATCH}, by window:")
    for way in ("headpool", "forward pass alone"):
        figures = []
        for window in windows:
            command = [sys.executable, __file__, "--memory", str(folder), way, str(window)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            figures.append(f"{window}: {int(done.stdout.split()[-1]) / 1e6:,.0f} MB")
        print(f"  {way}: {', '.join(figures)}")
    logits = [f"{window}: {window * MEMORY_BATCH * VOCABULARY * 4 / 1e6:,.0f} MB" for window in windows]
    print(f"  all logits at once would be {', '.join(logits)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        folder, way, window = options.memory
        memory(folder, way, int(window))
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch))
        compare("bundled model, vocabulary 2,048", RECIPE / "model", options.tokens, options)
        compare("bundled model, by sentence", RECIPE / "model", options.tokens, options, sentences=True)
        compare(f"synthetic model, vocabulary {VOCABULARY:,}", scratch, options.tokens // 4, options)
        compare_memory(Path(scratch), MEMORY_WINDOWS)


if __name__ == "__main__":
    main()
