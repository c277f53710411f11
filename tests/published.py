"""What of the checkpoint that the tests publish goes up."""

import hub

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
PUBLISHED = {
    *SHARDS, "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "headpool.json", "README.md", "SOURCE_README.md", "LICENSE",
}  # fmt: skip

LARGE = sum(hub.Hub.is_large(name) for name in PUBLISHED)
