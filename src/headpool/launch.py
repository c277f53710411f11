"""Start the uptrain stage in processes of its own, with a recipe's `launch` settings."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from headpool.destination import locked
from headpool.errors import HeadpoolError, Interrupted, RequestError, did_you_mean
from headpool.recipe import Recipe
from headpool.uptrain.signals import PROCESSES, StopRequest

PATIENCE_SECONDS = "300"
"""How long torchrun waits for its processes to save before it kills them; by default for 30 seconds, in which the state
of a large model is not written.
"""


def launch_uptraining(recipe: Recipe, launch: Mapping[str, str | int | float | bool], *, fresh: bool = False) -> None:
    """Run `headpool uptrain` under `accelerate launch` (torchrun for several processes without GPUs: there accelerate
    starts one) and wait for it.

    As in a run without `launch`, the state of a finished training with other settings is replaced; `fresh` drops any.
    A signal goes on to the processes, which save and end; all are waited for. Raises Interrupted then, and
    HeadpoolError when they fail.
    """
    work = Path(recipe.output) / "work" / "uptrain"
    work.mkdir(parents=True, exist_ok=True)
    written = work / "recipe.yaml"
    written.write_text(recipe.to_yaml(), encoding="utf-8")
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": PATIENCE_SECONDS} | os.environ
    environment |= {PROCESSES: str(launch["num_processes"])} if "num_processes" in launch else {}
    with StopRequest() as stop:
        verb = [*command(launch, has_gpu=_has_gpu()), str(written), "--replace", *(["--fresh"] if fresh else [])]
        # A group of its own: Ctrl-C reaches torchrun once, through us (when it comes twice it gives up waiting), and
        # the child of an accelerate that passes no signal on. Standard output is for what the whole run says.
        code = _wait(subprocess.Popen(verb, env=environment, process_group=0, stdout=sys.__stderr__), stop)
        if stop.number:
            _wait_until_left(work)
    if stop.number:
        raise Interrupted(stop.number, "stopped while uptraining; the same command goes on from what was saved")
    if code != 0:
        raise HeadpoolError(f"uptraining in launched processes failed (exit code {code}); what they said stands above")


def _wait(process: subprocess.Popen[bytes], stop: StopRequest) -> int:
    """Its exit code. The first signal goes on to its whole group, once."""
    passed_on = False
    while True:
        if stop.number and not passed_on:
            os.killpg(process.pid, stop.number)
            passed_on = True
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue


def _wait_until_left(work: Path) -> None:
    """Until no process trains in `work` any more: accelerate itself does not wait for its child when it is stopped."""
    while True:
        try:
            with locked(work, "busy"):
                return
        except RequestError:
            time.sleep(0.2)


def check_options(launch: Mapping[str, object]) -> None:
    """RequestError for an option that `accelerate launch` does not have, with the near one."""
    from accelerate.commands.launch import launch_command_parser

    known = [action.dest for action in launch_command_parser()._actions]
    for name in launch:
        if name.replace("-", "_") not in known:
            raise RequestError(f"launch.{name}: accelerate launch has no such option{did_you_mean(name, known)}")


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
