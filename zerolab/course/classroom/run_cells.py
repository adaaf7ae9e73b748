"""Run a notebook in a new kernel, from a process of its own, and report the cells that fail.

    python -m zerolab.course.classroom.run_cells FOLDER CELL_SECONDS

FOLDER has the file ``notebook``, and gets ``cell`` (the number of the cell that runs) and ``errors`` (JSON:
each cell that failed). The kernel works in FOLDER/work. Outputs are dropped as they come.
"""

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

KERNEL_DIED = 3  # the exit status


class Silent(NotebookClient):
    """A client that keeps no output, because a loop that prints would fill the memory."""

    def output(self, *_: Any) -> None:
        """Drop it."""


def main(folder: Path, cell_seconds: int) -> int:
    """Run all cells, also after one that fails."""
    errors: list[dict[str, Any]] = []

    def begins(cell: nbformat.NotebookNode, **_: Any) -> None:
        if "number" in cell.metadata:
            (folder / "cell").write_text(str(cell.metadata.number))

    def ended(cell: nbformat.NotebookNode, execute_reply: dict, **_: Any) -> None:
        reply = execute_reply["content"]
        if reply["status"] == "error" and "number" in cell.metadata:
            said = f"{reply['ename']}: {reply['evalue']}"[:500]
            errors.append({"cell": cell.metadata.number, "error": said})
            (folder / "errors").write_text(json.dumps(errors), "utf-8")

    client = _client(folder, cell_seconds, on_cell_execute=begins, on_cell_executed=ended)
    try:
        client.execute()
    except DeadKernelError:
        return KERNEL_DIED
    return 0


def _client(folder: Path, cell_seconds: int, **hooks: Any) -> Silent:
    """Return a client that interrupts a cell at its limit, and goes on after one that fails."""
    late = {
        "ename": "Stopped",
        "evalue": f"ran for {cell_seconds} s, the limit (--cell-timeout)",
        "traceback": [],
    }
    return Silent(
        nbformat.read(folder / "notebook", as_version=4),
        timeout=cell_seconds,
        kernel_name="python3",
        allow_errors=True,
        interrupt_on_timeout=True,
        error_on_timeout=late,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": folder / "work"}},
        **hooks,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
