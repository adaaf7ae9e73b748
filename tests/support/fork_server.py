"""The fork server of the tests: ranks inherit what earlier ranks found out about torch's optimizers.

A rank tries the optimizer that it is given. That takes about as much processor time as a few steps of a small
model. Most tests use a class of torch.optim. Here the first rank with such a class and its keywords tries it,
and tells the server the verdict. Ranks that are forked later have it, as the first rank has it for a second
optimizer. All else is the launcher's own fork server.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import pickle
import sys

VERDICTS = "zerolab.optimizer.probe.verdict"
TABLES = "_verdicts", "_per_element"
MOST_BYTES = 4096  # a pipe takes so many at once, or none


def load_original(path: list[str]):
    """The launcher's fork server, as a module; zerolab itself is not imported for it."""
    (package,) = importlib.machinery.PathFinder.find_spec("zerolab", path).submodule_search_locations
    file = os.path.join(package, "launcher", "forkserver.py")
    spec = importlib.util.spec_from_file_location("fork_server_of_the_launcher", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


original = load_original(json.loads(sys.argv[2]))


class Inherited(original.inherited.Inherited):
    """The modules that ranks inherit, with the verdicts in them that ranks have found out."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bytes] = []  # (table, key, value), pickled: the class of a value may be imported anew
        self.read, self.write = os.pipe()
        for fd in (self.read, self.write):
            os.set_blocking(fd, False)

    def load(self, names) -> bool:
        imported = super().load(names)
        if VERDICTS in sys.modules:
            self.listen(sys.modules[VERDICTS], self.told if imported else [])
        return imported

    def listen(self, verdicts, told: list[bytes]) -> None:
        """Put into the tables what was told before or since, and have the ranks tell what they find out."""
        new = list(self.drained())
        self.told += new
        for each in [*told, *new]:
            table, key, value = pickle.loads(each)
            getattr(verdicts, table)[key] = value
        for table in TABLES:
            if not isinstance(getattr(verdicts, table), Telling):
                setattr(verdicts, table, Telling(table, self.write, getattr(verdicts, table)))

    def drained(self):
        with contextlib.suppress(BlockingIOError):
            while size := os.read(self.read, 4):
                yield os.read(self.read, int.from_bytes(size))


class Telling(dict):
    """A table that tells the server what a rank writes into it about a class of torch.optim."""

    def __init__(self, name: str, fd: int, *rest) -> None:
        super().__init__(*rest)
        self.name, self.fd, self.server = name, fd, os.getpid()

    def __setitem__(self, key, value) -> None:
        super().__setitem__(key, value)
        if os.getpid() == self.server or not key[0].__module__.startswith("torch.optim"):
            return
        told = pickle.dumps((self.name, key, value))
        if len(told) + 4 <= MOST_BYTES:
            with contextlib.suppress(BlockingIOError):  # another rank tells it later
                os.write(self.fd, len(told).to_bytes(4) + told)


original.inherited.Inherited = Inherited

if __name__ == "__main__":
    original.main(*sys.argv[1:])
