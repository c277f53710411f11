"""Load a checkpoint's names and shapes in the stock class and report what does not fit.

Run as a process of its own (`python -m headpool.check CONFIG_DIRECTORY WEIGHTS_DIRECTORY`), it prints one JSON
object: the lists `missing`, `unexpected` and `mismatched`, and the `shapes` of what is missing. Weights are not read:
headers alone decide, so that it can run while the files are still being filled. transformers' memory and start-up stay
out of the process that converts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headpool.errors import HeadpoolError, RequestError

_KINDS = ("missing", "unexpected", "mismatched")


@dataclass(frozen=True)
class Report:
    """What the stock class says of a checkpoint: names that it lacks, does not know, or wants in another shape.

    shapes: what the config makes of the tensors that it lacks.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    shapes: Mapping[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Report":
        """A report in JSON's types."""
        names: dict[str, Any] = {kind: tuple(found[kind]) for kind in _KINDS}
        return cls(**names, shapes=found.get("shapes", {}))

    def names(self) -> dict[str, tuple[str, ...]]:
        """The names by what is wrong with them."""
        return {kind: getattr(self, kind) for kind in _KINDS}

    def beyond(self, other: "Report") -> "Report":
        """What this report complains of and `other` does not."""
        known = other.names()
        new: dict[str, Any] = {kind: tuple(sorted(set(own) - set(known[kind]))) for kind, own in self.names().items()}
        return Report(**new)

    def __bool__(self) -> bool:
        return any(self.names().values())

    def __str__(self) -> str:
        return "; ".join(f"{kind}: {', '.join(map(str, names[:5]))}" for kind, names in self.names().items() if names)


class Check:
    """A check under way in its own process."""

    def __init__(self, config: Path, weights: Path) -> None:
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headpool.check", str(config), str(weights)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def result(self) -> Report:
        """Wait for the report. RequestError when the stock class cannot be built or loaded at all."""
        out, err = self._process.communicate()
        if self._process.returncode < 0:
            raise HeadpoolError(f"the check of the result was killed by signal {-self._process.returncode}")
        if self._process.returncode != 0:
            lines = err.strip().splitlines()
            raise RequestError(
                f"the stock class cannot be built from this config: {lines[-1] if lines else 'no reason'}"
            )
        return Report.of(json.loads(out))

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def load(config_directory: str, weights_directory: str) -> dict[str, Any]:
    """The stock class's report on the weights of one directory under the config of another, in JSON's types."""
    import transformers

    from headpool.loading import stock_class

    config = transformers.AutoConfig.from_pretrained(config_directory)
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    model_class = named or stock_class(config)
    model, info = model_class.from_pretrained(
        weights_directory,
        config=config,
        generation_config=transformers.GenerationConfig(),  # else it is looked for beside a config.json
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    wanted = model.state_dict() if info["missing_keys"] else {}
    return {
        "missing": sorted(info["missing_keys"]),
        "shapes": {name: list(wanted[name].shape) for name in info["missing_keys"] if name in wanted},
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(
            f"tensor {name!r} is {list(found)}, the config makes it {list(wanted)}"
            for name, found, wanted in info["mismatched_keys"]
        ),
    }


if __name__ == "__main__":
    print(json.dumps(load(sys.argv[1], sys.argv[2])))  # noqa: T201
