"""The modules of zerolab that the fork server imports, so that its ranks need not.

A rank that imports them itself takes a quarter of a second of processor time, and does so at each launch.
The fork server loads this file by its path; it may import the standard library only.
"""

import gc
import importlib
import os
import sys
import time
import types
from collections.abc import Sequence


class Inherited:
    """The modules of zerolab that this process has imported, and the ranks inherit.

    All are imported again when the file of one has changed. A caller with another ``sys.path`` gets them anew
    too, and so does one with another working directory, because ``sys.path`` may refer to it.
    """

    COARSE_NS = 10**9  # a file may say that it was written so much earlier than it was

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}  # when each was written, and its bytes
        self.where: tuple[list[str], str] = ([], "")
        self.began_ns = 0

    def update(self, path: list[str], directory: str, names: Sequence[str]) -> None:
        """Have what the package offers, and the modules `names`, as their source is now.

        Where one cannot be imported, none stays: the ranks import it themselves, and report why they cannot.
        """
        try:
            if self.where != (path, directory) or self.changed():
                self.forget()
                self.where, self.began_ns = (path, directory), time.time_ns()
                os.chdir(directory)
                sys.path[:] = path
                importlib.invalidate_caches()
            if self.load(names):
                gc.freeze()  # collections in a rank then leave the shared pages shared
        except (Exception, SystemExit):
            self.forget()

    def load(self, names: Sequence[str]) -> bool:
        """Import what is missing; return whether anything was."""
        before = len(sys.modules)
        zerolab = importlib.import_module("zerolab")
        for name in zerolab.__all__:
            getattr(zerolab, name)
        for name in ("zerolab.launcher.rank", *names):
            importlib.import_module(name)
        if len(sys.modules) == before:
            return False
        files = [getattr(module, "__file__", None) for module in ours().values()]
        self.files = {file: written(file) for file in files if file}
        return True

    def changed(self) -> bool:
        """Whether a file is another than the one that was imported, or may have become so meanwhile."""
        latest = self.began_ns - self.COARSE_NS
        return any(written(file) != was or was[0] > latest for file, was in self.files.items())

    def forget(self) -> None:
        """Drop all, so that the next import runs the source."""
        for name in ours():
            del sys.modules[name]
        self.files, self.where = {}, ([], "")
        gc.unfreeze()
        gc.collect()


def ours() -> dict[str, types.ModuleType]:
    """The modules of zerolab that are imported."""
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "zerolab"}


def written(file: str) -> tuple[int, int]:
    """When a file was written, in nanoseconds, and its size in bytes."""
    found = os.stat(file)
    return found.st_mtime_ns, found.st_size
