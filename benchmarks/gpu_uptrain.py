"""Uptraining on a GPU: a model of a billion parameters in bf16, against a bare PyTorch loop; prints MFU.

    python benchmarks/gpu_uptrain.py [--steps 12] [--sequence 2048] [--batch 16] [--micro 8]

A Llama-shaped model with random weights (16 layers, hidden 2048, 16 query heads, 4 K/V heads, vocabulary 32000) and the
bundled text. Takes under four minutes on an H100.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from contestants import Race, bare, headpool, trainer
from transformers import LlamaConfig, LlamaForCausalLM

from headpool.uptrain.metrics import flops_per_token, peak_flops

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"
SHAPE = {
    "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("steps", 12), ("sequence", 2048), ("batch", 16), ("micro", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_uptrain.py: no GPU here")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = LlamaConfig(**SHAPE, dtype="bfloat16")
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder / "model")
        count = sum(one.numel() for one in model.parameters()) - model.get_input_embeddings().weight.numel()
        del model
        torch.cuda.empty_cache()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(QUICKSTART / "model" / file, folder / "model" / file)
        race = Race(folder / "model", QUICKSTART / "train.txt", folder, **vars(options))
        given = race.batches()
        speeds, notes = {}, [""]
        for contestant in ("headpool", "bare loop", "transformers.Trainer"):
            torch.cuda.reset_peak_memory_stats()
            if contestant == "headpool":
                times, _, notes = headpool(race)
            else:
                times = (bare if contestant == "bare loop" else trainer)(race, given)
            speeds[contestant] = race.sequence * race.batch / statistics.median(times)
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"{contestant}: {speeds[contestant]:,.0f} tokens/s, {peak:.1f} GiB at most")
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    flops = flops_per_token(count, SHAPE["num_hidden_layers"], SHAPE["hidden_size"], race.sequence)
    if (best := peak_flops(device)) is not None:
        print(f"MFU on {device}: {speeds['headpool'] * flops / best:.1%}")
    print(f"the progress line said: {notes[-1]}")
    print(f"headpool / bare loop: {speeds['headpool'] / speeds['bare loop']:.3f} (goal: 0.97)")
    print(f"headpool / transformers.Trainer: {speeds['headpool'] / speeds['transformers.Trainer']:.3f} (goal: 1.0)")


if __name__ == "__main__":
    main()
