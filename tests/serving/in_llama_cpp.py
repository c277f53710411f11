"""Greedy continuations by llama.cpp, in an environment of its own: `python in_llama_cpp.py FILE.gguf TOKENS`.

Reads and prints what in_vllm.py does.
"""

import json
import os
import sys


def main(model: str, tokens: int) -> dict[str, object]:
    import llama_cpp
    import numpy as np

    whole = llama_cpp.GGML_TYPE_F32  # its cache is float16 by default
    llama = llama_cpp.Llama(
        model, n_ctx=64, n_threads=1, logits_all=True, type_k=whole, type_v=whole, flash_attn=False, verbose=False
    )
    answers = []
    for prompt in json.load(sys.stdin):
        llama.reset()
        llama.eval(prompt)
        answer = []
        for _ in range(tokens):
            logits = llama.scores[llama.n_tokens - 1].astype(np.float64)
            token = int(logits.argmax())
            answer.append([token, float(-np.log(np.exp(logits - logits[token]).sum()))])
            llama.eval([token])
        answers.append(answer)
    return {"version": llama_cpp.__version__, "answers": answers}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        json.dump(main(sys.argv[1], int(sys.argv[2])), out)
