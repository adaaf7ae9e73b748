"""Promise: a full, broken or missing disk is an error before training starts, and no file is left behind."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import offloaded, subjects, together

import zerolab
from zerolab import tier
from zerolab.optimizer.offload import Parcel
from zerolab.tier import DiskTier, HostTier

for module in (sys.modules[__name__], offloaded, subjects, together):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

PSI = 5 * 16 * 16
CPU = torch.device("cpu")


@pytest.fixture
def disk():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def storage_of(*values: float) -> torch.UntypedStorage:
    return torch.tensor(values, dtype=torch.float32).untyped_storage()


# The tiers.


@pytest.mark.parametrize("kind", ["disk", "host"])
def test_what_was_written_is_read_and_counted(kind: str, disk: Path):
    ours = DiskTier(disk, 8) if kind == "disk" else HostTier(CPU)
    first, second = ours.place(8), ours.place(12)
    ours.write(first, storage_of(1, 2))
    ours.write(second, storage_of(3, 4, 5))
    found = torch.zeros(2), torch.zeros(3)
    ours.read(second, found[1].untyped_storage())
    ours.read(first, found[0].untyped_storage())
    assert [each.tolist() for each in found] == [[1, 2], [3, 4, 5]]
    assert (ours.written_bytes, ours.read_bytes) == (20, 20)
    assert list(disk.iterdir()) == []
    found[0].untyped_storage().resize_(0)  # it can still be freed


def test_a_place_that_was_given_back_is_given_out_again(disk: Path):
    """Else the file of checkpoints would grow in every step."""
    ours = DiskTier(disk, 8)
    first = ours.place(8)
    assert ours.place(8) != first
    ours.give_back(first, 8)
    assert ours.place(8) == first


def test_calls_that_move_a_part_are_repeated(disk: Path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: write(file, content[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: read(file, [parts[0][:5]], offset))
    ours, found = DiskTier(disk, 0), torch.zeros(6)
    place = ours.place(24)
    ours.write(place, storage_of(*range(6)))
    ours.read(place, found.untyped_storage())
    assert found.tolist() == list(range(6))


def test_a_file_that_ends_too_early_is_an_error(disk: Path):
    ours = DiskTier(disk, 24)
    place = ours.place(24)
    os.ftruncate(ours._file.fileno(), 20)
    with pytest.raises(OSError, match=rf"offload_dir {disk} ends 4 bytes too early"):
        ours.read(place, torch.zeros(6).untyped_storage())


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_blocks_are_allocated_before_anything_is_written(has_fallocate: bool, disk: Path, monkeypatch):
    if not has_fallocate:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate")
    ours = DiskTier(disk, 3 * 2**20 + 1)
    status = os.fstat(ours._file.fileno())
    assert status.st_size == 3 * 2**20 + 1 and status.st_blocks * 512 >= status.st_size
    assert status.st_nlink == 0, "it has no name"
    ours.place(2**20)
    assert os.fstat(ours._file.fileno()).st_size == status.st_size, "that was reserved"


def test_without_unnamed_files_the_name_is_removed_at_once(disk: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    ours = DiskTier(disk, 8)
    assert os.fstat(ours._file.fileno()).st_nlink == 0 and list(disk.iterdir()) == []


def test_memory_is_not_taken_for_a_disk(disk: Path, tmp_path: Path, monkeypatch, recwarn):
    DiskTier(disk, 0)
    assert not recwarn.list and not tier.lies_in_memory(disk)
    if Path("/dev/shm").is_dir():
        with pytest.warns(
            UserWarning, match=r"offload_dir is /dev/shm, which lies in memory \(tmpfs\).*on a disk"
        ):
            DiskTier(Path("/dev/shm"), 0)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_the_warning_names_the_line_of_the_user():
    with pytest.warns(UserWarning, match="lies in memory") as caught:
        zerolab.Checkpointing(offload="disk", offload_dir="/dev/shm")
    assert [warning.filename for warning in caught] == [__file__]


# Parcels.


def parcel(tensor: torch.Tensor, ours: tier.Tier) -> Parcel:
    return Parcel(ours, lambda: [tensor], lambda: None)


def test_a_failed_write_leaves_the_tensors_here(disk: Path, monkeypatch):
    tensor = torch.arange(6.0)
    mine = parcel(tensor, DiskTier(disk, 24))
    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="Input/output"):
        mine.leave()
    assert tensor.tolist() == list(range(6)) and mine.away_bytes == 0
    monkeypatch.undo()
    mine.leave()
    assert tensor.untyped_storage().nbytes() == 0 and mine.away_bytes == 24


def test_a_failed_read_leaves_them_away(disk: Path, monkeypatch):
    tensor = torch.arange(6.0)
    mine = parcel(tensor, DiskTier(disk, 24))
    mine.leave()
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(OSError, match="Input/output"), mine.here():
        raise AssertionError("the block was entered")
    assert tensor.untyped_storage().nbytes() == 0 and mine.away_bytes == 24
    monkeypatch.undo()
    with mine.here(), mine.here():
        assert tensor.tolist() == list(range(6))
    assert tensor.untyped_storage().nbytes() == 0


def fails(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_they_stay_until_the_last_who_needs_them_has_left():
    tensor = torch.arange(6.0)
    mine = parcel(tensor, HostTier(CPU))
    with mine.here():
        with mine.here():
            tensor += 1
        assert tensor.tolist() == [1, 2, 3, 4, 5, 6]
    assert mine.away_bytes == 24


# Bad input.


def refused(**keywords) -> tuple[str, bool]:
    """On a rank: the error, and whether the model is as it was, and can be trained without offloading."""
    model = subjects.Ladder()
    before = [(type(p), p.data_ptr()) for p in model.parameters()]
    try:
        zerolab.ZeroOptimizer(model, torch.optim.Adam, **keywords)
    except (ValueError, TypeError, OSError) as error:
        same = before == [(type(p), p.data_ptr()) for p in model.parameters()]
        zerolab.ZeroOptimizer(model, torch.optim.Adam)
        return f"{type(error).__name__}: {error}", same
    raise AssertionError("it was accepted")


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"offload": "ssd"}, "ValueError: offload is 'ssd': choose from None, 'cpu', 'disk'"),
        ({"offload": True}, "ValueError: offload is True: choose from None, 'cpu', 'disk'"),
        ({"offload_dir": "/var/tmp"}, "ValueError: offload_dir is '/var/tmp' and offload None: pass"),
        ({"offload": "cpu", "offload_dir": "/x"}, "ValueError: offload_dir is '/x' and offload 'cpu': pass"),
        ({"offload": "disk"}, 'ValueError: offload is "disk" and offload_dir None: pass a folder'),
        ({"offload": "disk", "offload_dir": 3}, "TypeError: offload_dir is 3: pass a folder's path"),
        (
            {"offload": "disk", "offload_dir": "/not/there"},
            "ValueError: offload_dir is /not/there, which does not exist: pass a folder on a disk",
        ),
        (
            {"offload": "disk", "offload_dir": __file__},
            f"ValueError: offload_dir is {__file__}, which is not a folder: pass a folder on a disk",
        ),
        (
            {"offload": "disk", "offload_dir": "/proc"},  # where not even root can make a file
            "ValueError: offload_dir is /proc, and no file can be made there (",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(keywords: dict, message: str):
    for error, same in zerolab.launch(refused, 2, timeout=60, **keywords):
        assert error.startswith(message)
        assert same


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_folder_is_refused(disk: Path):
    disk.chmod(0o500)
    with pytest.raises(ValueError, match=r"no file can be made there \(Permission denied\): pass a folder"):
        tier.require_writable(disk)


def refused_without_room(folder: str, room_bytes: int) -> tuple[str, bool]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, resource.RLIM_INFINITY))
    try:
        return refused(offload="disk", offload_dir=folder, precision="mixed", stage=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_disk_without_room_is_refused_before_the_model_changes(disk: Path):
    share = 12 * PSI // 2
    for error, same in zerolab.launch(refused_without_room, 2, str(disk), share - 1, timeout=60):
        assert error.startswith(
            f"OSError: [Errno {errno.EFBIG}] offload_dir {disk} has no room for {share:,}"
        )
        assert "bytes are free): pass a folder on a larger disk, or use more ranks" in error
        assert same


def trains_with_no_byte_more(folder: str, cases: list) -> list[tuple[int, int]]:
    """On a rank: no byte of file beyond what was allocated at the start; allocated bytes and used ones."""
    found = []
    for subject, name, keywords in cases:
        optimizer = offloaded.build(
            subject, getattr(torch.optim, name), offload="disk", offload_dir=folder, **keywords
        )
        room = optimizer.offload.tier._allocated
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        try:
            offloaded.train(optimizer, subject)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found.append((room, optimizer.offload.tier._used))
    return found


def test_everything_is_allocated_before_the_first_step(disk: Path):
    cases = [
        ("gpt", "Adam", {"stage": stage, "precision": precision})
        for stage, precision in ((0, "fp32"), (1, "mixed"), (3, "mixed_fp16"))
    ]
    cases += [("gpt", "Adagrad", {"stage": 2}), ("gpt", "RMSprop", {"centered": True, "momentum": 0.5})]
    for found in zerolab.launch(trains_with_no_byte_more, 2, str(disk), cases, timeout=60):
        assert all(room == used > 0 for room, used in found)


def mounted(folder: Path, size: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    return os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode


def fill_up(folder: str) -> tuple[str, bool]:
    return refused(offload="disk", offload_dir=folder, precision="mixed", stage=1)


def test_a_full_file_system_is_refused_and_stays_empty(tmp_path: Path):
    if not mounted(tmp_path, "4k"):
        pytest.skip("file systems cannot be mounted here")
    try:
        ((error, same),) = zerolab.launch(fill_up, 1, str(tmp_path), timeout=60)
        assert error.startswith(f"OSError: [Errno {errno.ENOSPC}] offload_dir {tmp_path} has no room for")
        assert "(No space left on device; 4,096 bytes are free)" in error and same
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# A process that is killed.


def die_in_a_step(folder: str) -> None:
    class Deadly(torch.optim.Adam):
        armed = False  # while it is probed

        def step(self, closure=None):
            super().step(closure)
            if self.armed and self.state and next(iter(self.state.values()))["step"] >= 2:
                Path(f"{folder}.died").touch()
                os.kill(os.getpid(), 9)

    optimizer = offloaded.build("ladder", Deadly, precision="mixed", offload="disk", offload_dir=folder)
    assert os.listdir(folder) == [] and optimizer.offload.away_bytes > 0
    Deadly.armed = True
    offloaded.train(optimizer, "ladder")


def test_a_rank_that_is_killed_leaves_no_file(disk: Path):
    with pytest.raises(zerolab.WorkerError, match="SIGKILL"):
        zerolab.launch(die_in_a_step, 2, str(disk), timeout=60)
    Path(f"{disk}.died").unlink()  # it came to the step
    assert list(disk.iterdir()) == []


def frees_its_blocks(folder: str) -> list[int]:
    """The open files without a name, while an optimizer is there and after it was freed."""
    import gc

    def count() -> int:
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return sum(os.path.islink(each) and folder in os.readlink(each) for each in links)

    optimizer = offloaded.build("ladder", offload="disk", offload_dir=folder)
    found = [count()]
    del optimizer
    gc.collect()
    return [*found, count()]


def test_a_freed_optimizer_closes_its_file(disk: Path):
    assert zerolab.launch(frees_its_blocks, 1, str(disk), timeout=60) == [[1, 0]]
