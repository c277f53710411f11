"""The trained model as a stock checkpoint: the source's names, files, dtypes and config, with new values."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from headpool import families
from headpool.card import write_card
from headpool.check import Check, Report
from headpool.checkpoint import PROVENANCE, Source
from headpool.destination import check_space, staged
from headpool.errors import HeadpoolError, RequestError
from headpool.headers import FLOATS, TensorRecord, weight_files, weights_index
from headpool.rounding import round_once
from headpool.tensors import TORCH, read_tensor
from headpool.uptrain.parallel import Workers, whole


def write_checkpoint(workers: Workers, source: Source, out: Path, provenance: Mapping[str, Any]) -> None:
    """Write the student into the new directory `out`, replacing it if it exists.

    Trained tensors are rounded once to the dtype that they have in `source`; all others, config and sidecars are the
    source's bytes. The stock class has accepted the result before it appears. All processes have to call this; the main
    one writes. Raises HeadpoolError naming a tensor that is not finite or does not fit its dtype.
    """
    trained = _trained(workers, source)
    if not workers.accelerator.is_main_process:
        return
    files = _files(source)
    check_space(out, sum(record.nbytes for records in files.values() for record in records))
    with staged(out, overwrite=True) as staging:
        for name, copy in source.sidecars().items():
            (staging / copy).parent.mkdir(exist_ok=True)
            shutil.copyfile(source.directory / name, staging / copy)
        shutil.copyfile(source.directory / "config.json", staging / "config.json")
        for file, records in files.items():
            tensors = _unshared({record.name: _value(record, trained) for record in records})
            save_file(tensors, staging / file, metadata={"format": "pt"})
            shutil.copymode(staging / "config.json", staging / file)  # safetensors makes it private
        if len(files) > 1:
            places = ((record.name, record.nbytes, file) for file, records in files.items() for record in records)
            (staging / "model.safetensors.index.json").write_bytes(weights_index(places))
        inherited = _check(staging, source)
        held = {**provenance, "check": inherited.names()} if inherited else provenance
        (staging / PROVENANCE).write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")
        write_card(staging, out.resolve().name)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors that the source holds twice are written twice: safetensors takes no two names of one memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return result


def _trained(workers: Workers, source: Source) -> dict[str, Tensor]:
    """Every tensor of the source that belongs to a trained parameter, by its name on the disk, on the CPU and in the
    main process only. Where the source has one dtype, as nearly all have, it is rounded on the way.

    Attention whose names in the class are others comes whole: its files may hold in one tensor what trained and what
    did not.
    """
    student = workers.objective.student
    family = families.find_family(source.config)
    in_class = None if family.in_class is None else families.in_class(family)
    kinds = {record.dtype for record in source.tensors.values() if record.dtype in FLOATS}
    dtype = TORCH[kinds.pop()] if len(kinds) == 1 else torch.float32
    parts: dict[str, Tensor] = {}
    values: dict[Tensor, Tensor] = {}
    for name, parameter in student.named_parameters(remove_duplicate=False):  # tied ones stand under either name
        beside = in_class is not None and families.attention_tensor(in_class, name) is not None
        if not (parameter.requires_grad or beside):
            continue
        if parameter not in values:
            full = whole(parameter.detach())
            values[parameter] = (
                round_once(full, dtype).cpu() if workers.accelerator.is_main_process else full.new_empty(0)
            )
        parts[name] = values[parameter]
    return _names_on_disk(student, parts, source) if workers.accelerator.is_main_process else {}


def _names_on_disk(student: Any, parts: Mapping[str, Tensor], source: Source) -> dict[str, Tensor]:
    """Undo what the class does to names, and to the division of tensors, when it loads a checkpoint."""
    found: dict[str, Tensor] = revert_weight_conversion(student, dict(parts))
    known = {tensor.data_ptr() for name, tensor in found.items() if name in source.tensors}
    lost = [name for name, tensor in found.items() if name not in source.tensors and tensor.data_ptr() not in known]
    if lost:
        raise HeadpoolError(f"trained tensors have no place in the checkpoint of the source: {', '.join(lost[:5])}")
    return found


def _files(source: Source) -> dict[str, tuple[TensorRecord, ...]]:
    """The source's division into files, under the names that safetensors files have."""
    return dict(zip(weight_files(len(source.shards)), source.shards.values(), strict=True))


def _value(record: TensorRecord, trained: Mapping[str, Tensor]) -> Tensor:
    if record.name not in trained:
        return read_tensor(record)
    tensor = round_once(trained[record.name], TORCH[record.dtype])
    if tuple(tensor.shape) != record.shape:
        raise HeadpoolError(f"tensor {record.name!r} came out as {list(tensor.shape)} instead of {list(record.shape)}")
    if not bool(tensor.isfinite().all()):
        raise HeadpoolError(f"tensor {record.name!r} has values that are not finite in {record.dtype}")
    return tensor.contiguous()


def _check(staging: Path, source: Source) -> Report:
    """Refuse a result that fits its class less well than the source does; give the faults that both have."""
    report = Check(staging, staging).result()
    if report and (worse := report.beyond(Check(source.directory, source.directory).result())):
        raise RequestError(f"the result does not fit its class, and was removed: {worse}")
    return report
