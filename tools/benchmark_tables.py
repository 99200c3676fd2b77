"""Make tables of the results of the benchmarks, so that no page quotes a figure from memory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def results(name: str) -> dict[str, Any]:
    """Read the results of one benchmark."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def interval(values: Sequence[float], signed: bool = False) -> str:
    """Write a mean with its interval."""
    mean, low, high = (f"{value:+.3f}" if signed else f"{value:.3f}" for value in values)
    return f"{mean} [{low}, {high}]"


def quality(retrieval: Mapping[str, Any]) -> pandas.DataFrame:
    """List for each set the way that its tuning half chose, scored on the other half."""
    rows = []
    for name, found in retrieval.items():
        chosen = found["ways"][found["chosen"]]["held-out"]["mrr"]
        base = found["ways"][found["baseline"]]["held-out"]["mrr"]
        router = found.get("router")  # older files do not have it
        rows.append(
            {
                "set": name,
                "questions": chosen["n"],
                "best single dense index": interval([base[key] for key in ("mean", "ci_low", "ci_high")]),
                "chosen way": found["chosen"],
                "MRR@10": interval([chosen[key] for key in ("mean", "ci_low", "ci_high")]),
                "difference": interval(chosen["difference"], signed=True),
                "above 0.90": "yes" if chosen["mean"] > 0.9 else "",
                "routed rightly": f"{router['accuracy']:.0%}" if router else "",
            }
        )
    table = pandas.DataFrame(rows)
    return table if any(table["routed rightly"]) else table.drop(columns="routed rightly")


def sentence(retrieval: Mapping[str, Any], name: str) -> str:
    """Write the difference that the chosen way makes on one set."""
    found = retrieval[name]
    mean, low, high = found["ways"][found["chosen"]]["held-out"]["mrr"]["difference"]
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def end_to_end(found: Mapping[str, Any]) -> pandas.DataFrame:
    """List how long answers take when many ask at once."""
    rows = []
    for store in ("milvus_lite", "pgvector"):
        for mode in ("vector", "hybrid"):
            measured = found[store][mode]
            rows.append(
                {
                    "store": found[store]["product"],
                    "search": mode,
                    "p50 s": measured["seconds"]["p50"],
                    "p95 s": measured["seconds"]["p95"],
                    "limit": measured["limit"],
                    "holds": "yes" if measured["holds"] else "no",
                    "p95 s, one client": measured["one client alone, seconds"]["p95"],
                }
            )
    return pandas.DataFrame(rows)


def store_speed(found: Mapping[str, Any]) -> pandas.DataFrame:
    """List how fast stores load and search, beside the bare client."""
    rows = []
    for sizes in found.values():
        for measured in sizes.values():
            for mode, one in measured["one reader"].items():
                rows.append(
                    {
                        "store": f"{measured['product']}, {measured['search']}",
                        "rows": measured["rows"],
                        "rows/s loaded": round(measured["load"]["ours"]["rows_per_second_before_indexes"]),
                        "search": mode,
                        "p50 ms": one["ours"]["p50_ms"],
                        "p95 ms": one["ours"]["p95_ms"],
                        "bare p50 ms": one["bare"]["p50_ms"],
                        "added ms": one["layer"]["added_ms"],
                        "at most 10 % or 0.3 ms": "yes" if one["layer"]["holds"] else "no",
                    }
                )
    return pandas.DataFrame(rows)


def limits(found: Mapping[str, Any]) -> pandas.DataFrame:
    """List the limits of speed, with what was measured."""
    rows = [
        {"store": measured["product"], "rows": measured["rows"], **limit}
        for sizes in found.values()
        for measured in sizes.values()
        for limit in measured["limits"]
    ]
    table = pandas.DataFrame(rows)
    return table.assign(holds=["yes" if held else "no" for held in table["holds"]])


def layer(found: Mapping[str, Any]) -> pandas.DataFrame:
    """List what our layer costs over the bare client, as ratios of two runs side by side."""
    return pandas.DataFrame(found)
