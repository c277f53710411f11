"""Convert against `cp -r` plus sync, and against loading, averaging and saving with transformers: ratios from one run.

    python benchmarks/convert.py [--gigabytes 8] [--runs 3] [--folder DIR]

Makes a synthetic llama-shaped sharded bfloat16 checkpoint, then runs the three in turn, each as a process of its own:
with the source in the page cache, as after a download, and with the source evicted from it. Every one ends with a
sync. Times are wall-clock seconds. headpool's start-up (interpreter, imports) is reported apart: its throughput counts
from the moment when the conversion begins to its rename, the final check included. Memory is the operating system's
figure for the largest single process, and the sampled sum over the process tree.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HIDDEN, HEADS, INTERMEDIATE, VOCABULARY = 4096, 32, 11008, 32000
SHARD_BYTES = 2_000_000_000
KV_HEADS = 8

TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
source, out, kv_heads = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
d = model.config.head_dim
for layer in model.model.layers:
    for name in ("k_proj", "v_proj"):
        linear = getattr(layer.self_attn, name)
        heads = linear.weight.data.view(kv_heads, -1, d, linear.weight.shape[1])
        linear.weight = torch.nn.Parameter(heads.double().mean(1).to(heads.dtype).flatten(0, 1), requires_grad=False)
        linear.out_features = kv_heads * d
model.config.num_key_value_heads = kv_heads
model.save_pretrained(out, max_shard_size="2GB")
"""


@dataclass(frozen=True)
class Run:
    """Wall-clock seconds, and peak resident bytes of the largest process and of the whole tree."""

    seconds: float
    largest: int
    tree: int
    stdout: str


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        found |= {f"{stem}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        found |= {f"{stem}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        found[f"{stem}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        found |= {f"{stem}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def nbytes(shape: tuple[int, ...]) -> int:
    return 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """Write the checkpoint; returns the bytes of its tensors."""
    import numpy as np  # not torch: a child process inherits this one's resident memory in its own peak

    per_layer = sum(map(nbytes, shapes(1).values())) - sum(map(nbytes, shapes(0).values()))
    layers = max(1, round((gigabytes * 1e9 - sum(map(nbytes, shapes(0).values()))) / per_layer))
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes(layers).items():
        if sum(map(nbytes, groups[-1].values())) + nbytes(shape) > SHARD_BYTES:
            groups.append({})
        groups[-1][name] = shape
    normal = np.random.default_rng(0).standard_normal(1 << 21, dtype=np.float32) * np.float32(0.02)
    noise = memoryview((normal.view(np.uint32) >> 16).astype("<u2").view(np.uint8))  # type: ignore[arg-type]
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        end, header = 0, {"__metadata__": {"format": "pt"}}
        for name, shape in group.items():
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes(shape)]}  # type: ignore[dict-item]
            end += nbytes(shape)
            weight_map[name] = file
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            while end:
                end -= stream.write(noise[: min(end, len(noise))])
            os.fsync(stream.fileno())
    total = sum(map(nbytes, shapes(layers).values()))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": HIDDEN,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return total


def warm(folder: Path) -> None:
    """Have a folder's files in the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that they are read from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


CACHES = {"source cached": warm, "source not cached": evict}


def resident(root: int) -> int:
    """Resident bytes of a process and its descendants, now."""
    parents, sizes = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)], sizes[int(entry.name)] = (
            int(stat[1]),
            int(stat[21]) * os.sysconf("SC_PAGE_SIZE"),
        )

    def below(process: int) -> bool:
        while process not in (0, root):
            process = parents.get(process, 0)
        return process == root

    return sum(size for process, size in sizes.items() if below(process))


def measure(command: list[str]) -> Run:
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    tree = 0
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        tree = max(tree, resident(process.pid))
        time.sleep(0.05)
    stdout = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} … failed with {process.returncode}")
    os.sync()
    return Run(time.perf_counter() - begin, usage.ru_maxrss * 1024, tree, stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to make the files; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        source.mkdir()
        total = make_checkpoint(source, options.gigabytes)
        print(f"{total / 1e9:.2f} GB of tensors in {len(list(source.glob('*.safetensors')))} shards")
        commands = {
            "cp -r": ["cp", "-r", str(source), str(out)],
            "headpool": [
                *(sys.executable, "-m", "headpool", "convert", str(source), str(out)),
                *("--kv-heads", str(KV_HEADS), "--json"),
            ],
            "transformers": [sys.executable, "-c", TRANSFORMERS, str(source), str(out), str(KV_HEADS)],
        }  # fmt: skip
        for state, prepare in CACHES.items():
            runs: dict[str, list[Run]] = {name: [] for name in commands}
            for _ in range(options.runs):
                for name, command in commands.items():
                    prepare(source)
                    runs[name].append(measure(command))
                    shutil.rmtree(out)
                    os.sync()
            report(state, total, runs)


def report(state: str, total: int, runs: dict[str, list[Run]]) -> None:
    print(f"{state}:")
    for name, held in runs.items():
        print(f"  {name}, sync: {', '.join(f'{run.seconds:.1f}' for run in held)} s")
    converting = [json.loads(run.stdout)["seconds"] for run in runs["headpool"]]
    start_up = [run.seconds - seconds for run, seconds in zip(runs["headpool"], converting, strict=True)]
    whole = {name: statistics.median(run.seconds for run in held) for name, held in runs.items()}
    seconds = statistics.median(converting)
    print(f"  headpool, once started: {total / seconds / 1e6:.0f} MB/s; start-up {statistics.median(start_up):.1f} s")
    print(f"  throughput, headpool / cp -r, sync: {whole['cp -r'] / seconds:.2f} (goal: at least 0.8)")
    print(f"  speed, headpool / transformers: {whole['transformers'] / whole['headpool']:.2f} (goal: at least 3)")
    for what, values in (("largest process", "largest"), ("process tree", "tree")):
        peak = max(getattr(run, values) for run in runs["headpool"])
        print(f"  headpool's peak resident memory, {what}: {peak / 1e6:.0f} MB (goal: under 700 MB)")


if __name__ == "__main__":
    main()
