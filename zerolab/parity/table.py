"""Format the table that ``python -m zerolab verify`` prints: measurements above predictions."""

from collections.abc import Iterable

_COLUMNS = ("stage", "ranks", "", "bit-identical", "parameters", "gradients", "optimizer", "payload", "wire")
_HEADING = "Bytes on rank 0 after a step (padding and step counters apart), and bytes it sent in that step.\n"
_WIDTHS = (5, 5, 9, 13, 12, 12, 12, 12, 12)


def print_reports(reports: Iterable) -> int:
    """Print the reports as they come, and a closing line; 0 if all hold, 1 if any does not."""
    failed, count, balances = [], 0, {}
    for report in reports:
        if count == 0:
            print(_HEADING if report.backend == "gloo" else f"{_HEADING}Over NCCL, on GPUs.\n")
            print(_row(_COLUMNS))
        count += 1
        verdict = "True" if report.bit_identical else f"off by {report.max_abs_diff:.1e}"
        measured = _numbers(report.memory, report.traffic)
        print(_row((report.stage, report.world_size, "measured", verdict, *measured)))
        expected = _numbers(report.predicted_memory, report.predicted_traffic)
        print(_row(("", "", "predicted", "True", *expected)), flush=True)
        balances[report.world_size] = report.balance
        if not report.ok:
            failed.append(f"stage {report.stage} on {report.world_size}")
    for world_size, balance in balances.items():
        if balance is not None and world_size > 1:
            print(f"\nWhole parameters on {world_size} ranks: {balance}")
    if failed:
        print(f"\n{len(failed)} of {count} differ from what was predicted: {', '.join(failed)}")
    else:
        print(f"\nAll {count} are bit-identical to single-process training, in the predicted bytes.")
    return 1 if failed else 0


def _numbers(memory, traffic) -> tuple[str, ...]:
    sizes = (memory.params_bytes, memory.grads_bytes, memory.optimizer_bytes)
    return tuple(f"{size:,.0f}" for size in (*sizes, traffic.logical_bytes, traffic.wire_bytes))


def _row(cells: tuple) -> str:
    return "  ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()
