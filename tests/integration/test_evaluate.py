"""`evaluate` and its report on small checkpoints saved by transformers, against figures worked out here."""

import hashlib
import json
import math
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from headpool.checkpoint import open_source
from headpool.errors import HeadpoolError, RequestError
from headpool.eval.measure import Report, evaluate
from headpool.eval.models import ModelSpec
from headpool.eval.report import as_json, check_out, write_report
from headpool.eval.tables import table
from headpool.text import TextData, read_texts

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
POSITIONS = 48
VOCABULARY = 2048
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
TEXT = (QUICKSTART / "test.txt").read_text(encoding="utf-8")[200:2200]
BPE = Tokenizer.from_file(str(QUICKSTART / "model" / "tokenizer.json"))


def bpe(*, bos: bool = True) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=BPE, bos_token="<|endoftext|>" if bos else None)


def bpe_that_adds_bos() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(BPE.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = {letter: index + 1 for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, **alphabet}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def save(
    path: Path,
    tokenizer: Any,
    *,
    kv_heads: int = 4,
    dtype: torch.dtype = torch.float32,
    model: Any = None,
    **config: Any,
) -> str:
    torch.manual_seed(kv_heads)
    if model is None:
        model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": kv_heads, **config})).to(dtype)
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "mha": save(root / "mha", bpe(), dtype=torch.bfloat16),
        "gqa": save(root / "gqa", bpe(), kv_heads=1),
        "adds_bos": save(root / "adds_bos", bpe_that_adds_bos()),
        "no_bos": save(root / "no_bos", bpe(bos=False)),
        "bytes": save(root / "bytes", byte_tokenizer()),
    }


def data_of(*texts: str) -> TextData:
    return TextData(texts, "0" * 64, "texts")


def one(path: str, data: TextData, **options: Any) -> dict[str, Any]:
    result: dict[str, Any] = as_json(evaluate([ModelSpec("model", path)], data, **options))["models"][0]
    return result


def oracle(path: str, texts: list[str], *, bos: bool) -> tuple[float, int]:
    """Nats and tokens of texts that fit one window each: the stock class, all logits, one text at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    nats, tokens = 0.0, 0
    for text in texts:
        ids = [0] * bos + BPE.encode(text, add_special_tokens=False).ids
        if len(ids) < 2:
            continue
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        nats -= sum(log_p[t - 1, ids[t]].item() for t in range(1, len(ids)))
        tokens += len(ids) - 1
    return nats, tokens


@pytest.mark.parametrize(("name", "bos"), [("mha", True), ("adds_bos", True), ("no_bos", False)])
def test_each_text_has_its_own_windows_and_one_bos(checkpoints: dict[str, str], name: str, bos: bool) -> None:
    texts = ["", "It was", " a", TEXT[:60], "é"]
    nats, tokens = oracle(checkpoints[name], texts, bos=bos)
    result = one(checkpoints[name], data_of(*texts))
    assert result["tokens"] == tokens
    assert result["nats"] == pytest.approx(nats, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / len("".join(texts).encode()), rel=1e-6)
    assert result["bos"] is bos


@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_texts_around_the_window_are_scored_whole(checkpoints: dict[str, str], extra: int) -> None:
    ids = BPE.encode(TEXT).ids[: 32 + extra - 1]  # BOS makes it 32 + extra tokens
    text = BPE.decode(ids)
    assert BPE.encode(text).ids == ids
    results = [one(checkpoints["mha"], data_of(text), window=32, stride=stride) for stride in (32, 8)]
    assert [result["tokens"] for result in results] == [len(ids)] * 2
    whole = one(checkpoints["mha"], data_of(text), window=POSITIONS)
    assert results[1]["nats"] == pytest.approx(whole["nats"], rel=1e-2)
    if extra <= 0:  # one window holds it all
        assert [result["nats"] for result in results] == pytest.approx([whole["nats"]] * 2, rel=1e-6)


def test_nats_do_not_depend_on_the_batch_size(checkpoints: dict[str, str]) -> None:
    results = [
        one(checkpoints["gqa"], data_of(TEXT, TEXT[:333]), window=20, stride=7, batch_size=b) for b in (1, 5, 64)
    ]
    assert [result["nats"] for result in results] == pytest.approx([results[0]["nats"]] * 3, rel=1e-6)


def test_the_bundled_model_scores_a_chapter_as_a_plain_loop_does() -> None:
    """Default settings: windows of all 512 positions side by side, BOS first."""
    ids = [0, *BPE.encode(TEXT).ids]
    assert 512 < len(ids) < 1024
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model", dtype=torch.float32)
    nats = 0.0
    for piece in (ids[:512], ids[511:]):
        tokens = torch.tensor([piece])
        with torch.no_grad():
            nats += model(tokens, labels=tokens).loss.item() * (len(piece) - 1)
    report = evaluate([ModelSpec("model", str(QUICKSTART / "model"))], data_of(TEXT))
    assert (report.settings.window, report.settings.stride) == (512, 512)
    assert report.models[0].score.tokens == len(ids) - 1
    assert report.models[0].score.nats == pytest.approx(nats, rel=1e-5)
    assert report.models[0].cache.allocated == 2 * 4 * 8 * 16 * 4
    assert report.models[0].cache.formula_checkpoint == 2 * 4 * 8 * 16 * 2


@pytest.fixture(scope="module")
def compared(checkpoints: dict[str, str]) -> Report:
    (Path(checkpoints["gqa"]) / "headpool.json").write_text('{"method": "mean"}', encoding="utf-8")
    specs = [ModelSpec("baseline", checkpoints["mha"]), ModelSpec("model", checkpoints["gqa"])]
    return evaluate(specs, data_of(TEXT), window=32)


def test_the_report_holds_the_fields_that_scripts_rely_on(
    compared: Report, checkpoints: dict[str, str], tmp_path: Path
) -> None:
    path = write_report(compared, tmp_path / "deep" / "out")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written == as_json(compared)
    baseline, model = written["models"]
    assert (baseline["role"], model["role"]) == ("baseline", "model")
    assert (baseline["kv_heads"], model["kv_heads"]) == (4, 1)
    assert (baseline["label"], model["label"]) == (None, "converted, not yet uptrained")
    assert (baseline["uptrained"], model["uptrained"]) == (False, False)
    figures = baseline["cache_bytes_per_token"]
    assert (figures["formula"], figures["allocated"]) == (2 * 2 * 4 * 8 * 4, 2 * 2 * 4 * 8 * 4)
    assert (figures["checkpoint_dtype"], figures["formula_in_checkpoint_dtype"]) == (
        "bfloat16",
        2 * 2 * 4 * 8 * 2,
    )
    assert baseline["dtype"] == "float32"
    assert baseline["cache_curve"] == [{"tokens": 2**n, "bytes": 256 * 2**n} for n in range(6)]  # of 48 positions
    assert written["comparison"] == {
        "perplexity_ratio": pytest.approx(model["perplexity"] / baseline["perplexity"]),
        "bits_per_byte_ratio": pytest.approx(model["bits_per_byte"] / baseline["bits_per_byte"]),
        "cache_ratio": 0.25,
        "decode_speedup": None,
    }
    assert (baseline["comparison"], model["comparison"]) == (None, written["comparison"])
    assert (baseline["conversion"], model["conversion"]) == (None, {"method": "mean", "layers": []})
    for one, path in ((baseline, checkpoints["mha"]), (model, checkpoints["gqa"])):
        headers = open_source(path).headers_sha256()
        made = Path(path) / "headpool.json"
        told = headers.encode() + (made.read_bytes() if made.exists() else b"")
        assert one["checkpoint_sha256"] == hashlib.sha256(told).hexdigest()
    data = {"name": "texts", "sha256": "0" * 64, "texts": 1, "bytes": len(TEXT.encode()), "column": "text"}
    assert written["data"] == data
    assert written["settings"]["window"] == written["settings"]["stride"] == 32
    assert written["versions"]["torch"] == torch.__version__


def rendered(report: Report) -> str:
    console = Console(file=StringIO(), width=300)
    console.print(table(as_json(report)))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_shows_what_the_report_holds(compared: Report) -> None:
    text = rendered(compared)
    for result in compared.models:
        assert f"{result.score.perplexity:.3f}" in text
        assert f"{result.bits_per_byte:.4f}" in text
        assert result.spec.path in text
    assert "converted, not yet uptrained" in text
    assert "0.2500x" in text
    assert "256 in bfloat16" in text


def test_an_uptrained_model_is_called_so(tmp_path: Path) -> None:
    path = save(tmp_path / "m", bpe())
    (tmp_path / "m" / "headpool.json").write_text('{"method": "mean", "uptrain": {}}', encoding="utf-8")
    result = one(path, data_of(TEXT))
    assert (result["label"], result["uptrained"]) == ("converted and uptrained", True)


def test_different_tokenizers_compare_in_bits_per_byte_only(checkpoints: dict[str, str]) -> None:
    specs = [ModelSpec("baseline", checkpoints["mha"]), ModelSpec("model", checkpoints["bytes"])]
    report = evaluate(specs, data_of(TEXT), window=32)
    ratios = as_json(report)["comparison"]
    first, second = report.models
    assert second.score.tokens == len(TEXT.encode())
    assert ratios["perplexity_ratio"] is None
    assert ratios["bits_per_byte_ratio"] == pytest.approx(second.score.nats / first.score.nats)
    assert "compare them in bits per byte" in rendered(report)


def test_sliding_layers_are_explained(tmp_path: Path) -> None:
    config = MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8)
    result = one(save(tmp_path / "m", bpe(), model=MistralForCausalLM(config)), data_of(TEXT), window=40)
    figures = result["cache_bytes_per_token"]
    assert figures["formula"] == 2 * 2 * 2 * 8 * 4
    assert figures["allocated"] == pytest.approx(figures["formula"] * 8 / 40)
    assert figures["explanation"].startswith("2 of 2 layers hold at most 8 tokens")


@pytest.mark.parametrize(("dtype", "expected"), [(None, "float32"), ("auto", "bfloat16"), ("float64", "float64")])
def test_dtypes(checkpoints: dict[str, str], dtype: str | None, expected: str) -> None:
    result = one(checkpoints["mha"], data_of(TEXT[:200]), dtype=dtype, device="cpu")
    assert result["dtype"] == expected
    itemsize = getattr(torch, expected).itemsize
    assert result["cache_bytes_per_token"]["allocated"] == 2 * 2 * 4 * 8 * itemsize


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": POSITIONS + 1}, rf"window {POSITIONS + 1} is larger than the {POSITIONS} positions of "),
        ({"window": 16, "stride": 17}, "window 16, stride 17: the stride must lie between 1 and the window"),
        ({"stride": 0}, f"window {POSITIONS}, stride 0"),
        ({"batch_size": 0}, "batch size 0"),
        ({"dtype": "float8"}, "dtype 'float8': choose from auto, float32, bfloat16, float16, float64"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
    ],
)
def test_impossible_settings_are_refused_before_weights_are_read(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(RequestError, match=f"^{message}"):
        one(checkpoints["mha"], data_of(TEXT), **options)


def test_all_models_are_checked_before_the_first_is_scored(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    untokenized = save(tmp_path / "untokenized", None)
    small = save(tmp_path / "small", bpe(), vocab_size=300)
    (tmp_path / "empty").mkdir()
    for path, message in {
        untokenized: f"{untokenized}: no tokenizer there",
        small: f"{small}: its tokenizer gives token 20",
        str(tmp_path / "empty"): "no config.json",
        str(tmp_path / "nowhere"): "no such directory",
    }.items():
        with pytest.raises(RequestError, match=message):
            evaluate([ModelSpec("baseline", checkpoints["mha"]), ModelSpec("model", path)], data_of(TEXT))


def test_data_without_a_token_to_score_is_refused(checkpoints: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="nothing to score"):
        one(checkpoints["no_bos"], data_of("a", " the"))
    assert one(checkpoints["mha"], data_of("a", " the"))["tokens"] == 2


@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_weights_that_would_be_made_up_are_refused(tmp_path: Path, fault: str) -> None:
    path = save(tmp_path / "m", bpe())
    file, name = tmp_path / "m" / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(file)
    tensors[name] = tensors[name][:8].clone()
    if fault == "missing":
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RequestError, match=rf"1 tensors are missing or of another shape .*{name}"):
        one(path, data_of(TEXT))


def test_destinations_that_cannot_be_written(compared: Report, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RequestError, match="is a file, not a directory"):
            check_out(out)
        with pytest.raises(HeadpoolError, match="cannot be written"):
            write_report(compared, out)
    check_out(tmp_path / "new" / "deeper")
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208
    assert (tmp_path / "file").read_text() == "x"


def test_a_report_is_replaced_at_one_stroke(compared: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(compared, tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(HeadpoolError, match="No space left"):
        write_report(compared, tmp_path)
    assert path.read_bytes() == before


def test_a_text_file_is_one_text(checkpoints: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"It was.\n\nIt was not.\n")
    result = one(checkpoints["mha"], read_texts(tmp_path / "t.txt"))
    assert result["tokens"] == len(BPE.encode("It was.\n\nIt was not.\n").ids)
