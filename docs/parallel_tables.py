"""The tables of ``benchmarks/parallel.py``'s records: layers over two GPUs, and experts over two GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from measured_tables import ROOT, machine
from parallel_report import ALONE, EARLY_US, FORMS, PRODUCTS, SUMS, dense_rows, predicted_rows
from table_cells import table, times, us

EXCHANGES = {
    "rows in bf16": "rows in bf16",
    "rows in NVFP4": "rows in NVFP4",
    "gathered": "gathered by all",
    "experts in bf16": "experts and rows in bf16",
}
"""Names in a record, and titles, of the forms of an exchange of experts' rows."""
RECORDS = "parallel_nvidia_*.json"
FILES = {
    "sums": "parallel_sums_nvidia_*.json",
    "predicted": "parallel_predicted.json",
    # from a run of both, or of experts alone
    "experts": "parallel*_nvidia_*.json",
}
"""The files of a table's records, if they are not ``RECORDS``."""
STEPS = ("there", "experts", "back")


def of_records(name: str) -> str:
    """The table ``name`` of each record, one below the other; a line instead if no record exists."""
    files = FILES.get(name, RECORDS)
    paths = sorted((ROOT / "benchmarks" / "results").glob(files))
    found = [TABLES[name](json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return "\n".join(filter(None, found)) or "*Not measured yet.*\n"


def where(record: dict[str, Any]) -> str:
    """The machine, and how times were taken."""
    how = "medians of replays of a CUDA graph, µs, the slower GPU's, L2 cold and clean"
    return machine(record, f"NCCL {record['nccl']}, no NVLink multicast; {how}").replace("*One", "*Two", 1)


def dense(record: dict[str, Any]) -> str:
    """Layers over two GPUs; × is the speedup over one of them, in the same format."""
    rows = []
    for row, of in dense_rows(record):
        cells = [f"{us(of[form])} ({times(of['one'] / of[form])} ×)" if form in of else "" for form in FORMS]
        alone = [us(of[form]) if form in of else "" for form in ALONE]
        rows.append([row["model"], row["contestant"], str(row["rows"]), us(of["one"]), *cells, *alone])
    sums = [f"one sum alone, {how}" for how in ALONE.values()]
    head = ["layer of", "weights", "rows", "one GPU", *FORMS.values(), *sums]
    return where(record) + table(head, rows)


def parts(record: dict[str, Any]) -> str:
    """Each product alone, on one GPU and of a shard, in NVFP4."""
    rows = []
    for row, _ in dense_rows(record):
        if row["contestant"] == "w4a16":
            one, shard = (row["parts_us"][who] for who in ("one", "shard"))
            cells = [f"{us(one[name])} → {us(shard[name])} ({times(one[name] / shard[name])} ×)" for name in one]
            rows.append([row["model"], str(row["rows"]), *cells])
    return where(record) + table(["layer of", "rows", "qkv", "o", "gate and up, SiLU", "down"], rows)


def experts(record: dict[str, Any]) -> str:
    """Mixtures of experts over two GPUs, beside one GPU with the rows of both."""
    rows = []
    if not record.get("mixtures"):
        return ""
    for row in record["mixtures"]:
        of = row["us"]
        cells = [f"{us(of[name])} ({times(of['one'] / of[name])} ×)" for name in EXCHANGES]
        steps = [" · ".join(us(of[f"{name}: {step}"]) for step in STEPS) for name in ("rows in bf16", "rows in NVFP4")]
        rows.append([row["model"], str(row["tokens"]), us(of["one"]), *cells, *steps])
    head = ["layer of", "tokens a GPU", "one GPU", *EXCHANGES.values(), "bf16: there · experts · back", "NVFP4"]
    return where(record) + table(head, rows)


def sums(record: dict[str, Any]) -> str:
    """Sums over two GPUs by themselves, by the size of a GPU's rows."""
    of = record["us"]
    sizes = list(next(iter(of.values())))
    rows = [[f"{int(kib):,}", *(us(times_of[kib]) for times_of in of.values())] for kib in sizes]
    return where(record) + table(["KiB", *of], rows)


def predicted(record: dict[str, Any]) -> str:
    """The predicted gains of sums by stores and of early starts, from the times of another record."""
    rows = []
    for row in record["predicted"]:
        of = row["us"]
        ratios = [f"{us(of[two])} ({times(of[one] / of[two])} ×)" for one, two in PAIRS]
        rows.append([row["model"], str(row["rows"]), us(row["sum"]), us(of["one"]), us(of["one early"]), *ratios])
    head = ["layer of", "rows", "a sum", "one GPU", "one GPU, early", "two, peer stores", "two, peer stores, early"]
    return "*Modelled, µs, from times on two {gpu} of {date}.*\n\n".format(**record["from"]) + table(head, rows)


def counted(count: int, what: str) -> str:
    """A count with its noun, in the plural unless the count is 1."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def pays(record: dict[str, Any]) -> str:
    """The fastest way over two GPUs beside the fastest on one, NVFP4 weights: layers, and mixtures of experts."""
    rows = []
    for row, of in dense_rows(record):
        if row["contestant"] == "w4a16":
            two, how = min((of[form], words) for form, words in FORMS.items() if form in of and form != "local")
            rows.append([row["model"], counted(row["rows"], "row"), of["one"], two, how])
    for row in record["mixtures"]:
        of = row["us"]
        two, how = min((of[form], words) for form, words in EXCHANGES.items() if "experts in" not in form)
        rows.append([row["model"], counted(row["tokens"], "token") + " a GPU", of["one"], two, how])
    rows = [[model, size, us(one), us(two), f"{times(one / two)} ×", how] for model, size, one, two, how in rows]
    return where(record) + table(["layer of", "size", "one GPU", "two GPUs", "faster", "by"], rows)


def few(record: dict[str, Any]) -> str:
    """What a sum takes within a layer, and what an early start saves of a product, beside the predictions."""
    every = {(row["model"], row["rows"], row["contestant"]): of for row, of in dense_rows(record)}
    rows = []
    for row in predicted_rows(record) if any("early" in name for _, _, name in every) else ():
        plain, early = (every[row["model"], row["rows"], name] for name in ("w4a16", "w4a16 early"))
        within = [(plain[form] - plain["local"]) / SUMS for form in ("nccl", "peer", "pushed")]
        saved = [(plain[part] - early[part]) / PRODUCTS for part in ("one", "local")]
        cells = [f"{x:.1f}" for x in (*within, row["sum"], *saved, EARLY_US["product"])]
        rows.append([row["model"], str(row["rows"]), *cells])
    sums = ["a sum within a layer: NCCL", "peer loads", "peer stores", "modelled"]
    starts = ["an early start saves: one GPU", "a shard", "modelled"]
    return where(record) + table(["layer of", "rows", *sums, *starts], rows) if rows else ""


PAIRS = ("one", "pushed"), ("one early", "pushed early")
FUNCTIONS = dense, parts, experts, sums, predicted, few, pays
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {f.__name__: f for f in FUNCTIONS}
