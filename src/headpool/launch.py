"""Start the uptrain stage in processes of its own, with a recipe's `launch` settings."""

import difflib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headpool.errors import HeadpoolError, Interrupted, RequestError
from headpool.recipe import Recipe
from headpool.uptrain.signals import PROCESSES, StopRequest


def launch_uptraining(recipe: Recipe, launch: Mapping[str, str | int | float | bool], *, fresh: bool = False) -> None:
    """Run `headpool uptrain` under `accelerate launch` (torchrun for several processes without GPUs: there accelerate
    starts one) and wait for it.

    As in a run without `launch`, the state of a finished training with other settings is replaced; `fresh` drops any.
    A signal goes on to the processes, which save and end. Raises Interrupted then, and HeadpoolError when they fail.
    """
    work = Path(recipe.output) / "work" / "uptrain"
    work.mkdir(parents=True, exist_ok=True)
    written = work / "recipe.yaml"
    written.write_text(recipe.to_yaml(), encoding="utf-8")
    environment = os.environ | ({PROCESSES: str(launch["num_processes"])} if "num_processes" in launch else {})
    with StopRequest() as stop:
        verb = [*command(launch, has_gpu=_has_gpu()), str(written), "--replace", *(["--fresh"] if fresh else [])]
        process = subprocess.Popen(verb, env=environment)
        code, passed_on = None, False
        while code is None:
            if stop.number and not passed_on:
                process.send_signal(stop.number)
                passed_on = True
            try:
                code = process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
    if stop.number:
        raise Interrupted(stop.number, "stopped while uptraining; the same command goes on from what was saved")
    if code != 0:
        raise HeadpoolError(f"uptraining in launched processes failed (exit code {code}); what they said stands above")


def check_options(launch: Mapping[str, object]) -> None:
    """RequestError for an option that `accelerate launch` does not have, with the near one."""
    from accelerate.commands.launch import launch_command_parser

    known = [action.dest for action in launch_command_parser()._actions]
    for name in launch:
        if name.replace("-", "_") not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(f"launch.{name}: accelerate launch has no such option{hint}")


def command(launch: Mapping[str, str | int | float | bool], *, has_gpu: bool) -> list[str]:
    """The command line up to the recipe: `launch` holds options of `accelerate launch`, without their dashes."""
    stage = ["-m", "headpool", "uptrain"]
    several = int(launch.get("num_processes", 1)) > 1
    if several and not has_gpu and "config_file" not in launch:
        count = str(launch["num_processes"])
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, *stage]
    options: list[str] = []
    for name, value in launch.items():
        if value is not False:
            options += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return [sys.executable, "-m", "accelerate.commands.launch", *options, *stage]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
