"""Greedy continuations by vLLM, in an environment of its own: `python in_vllm.py MODEL IMPLEMENTATION TOKENS`.

IMPLEMENTATION: auto (vLLM's own class) or transformers (its backend for all others). Reads a JSON list of prompts, each
a list of token ids, from standard input, and prints on standard output, as one JSON object, the version and for each
prompt the tokens that follow with their log-probabilities.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main(model: str, implementation: str, tokens: int) -> dict[str, object]:
    import vllm

    llm = vllm.LLM(model, dtype="float32", model_impl=implementation, enforce_eager=True, max_model_len=64, seed=0)
    wanted = vllm.SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, logprobs=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in json.load(sys.stdin)]
    answers = [answer.outputs[0] for answer in llm.generate(prompts, wanted, use_tqdm=False)]
    return {
        "version": vllm.__version__,
        "answers": [
            [[token, held[token].logprob] for token, held in zip(one.token_ids, one.logprobs, strict=True)]
            for one in answers
        ],
    }


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # vLLM's workers print
        json.dump(main(sys.argv[1], sys.argv[2], int(sys.argv[3])), out)
