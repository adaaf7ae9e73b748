"""Promise: what is not what was saved is never loaded, not even in part, and the error says what to load."""

import random
import re
import shutil
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.numbered import build, fill, filled_with, outcome, save_numbers
from torch import nn

import zerolab
from zerolab.checkpoint import generations, manifest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

FLIPS = 400


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def flip(path: Path, offset: int, bit: int = 0x40) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= bit
    path.write_bytes(content)


def flip_in(generation: Path, key: str) -> str:
    """Flip a bit in the middle of a record; the name it goes by."""
    record = manifest.read(generation, trust=False)["records"][key][-1]
    flip(generation / record.file, record.offset + record.length // 2)
    return f"{record} in {record.file}"


def load_all(folders: dict[str, Path]) -> dict[str, str]:
    """On a rank: what loading each folder says; no value may have changed, on any rank."""
    optimizer, found = build(), {}
    state = [value.clone() for value in optimizer.local.state_tensors()]
    for case, folder in folders.items():
        fill(optimizer, 7)
        found[case] = outcome(lambda folder=folder: zerolab.load(optimizer, folder))
        assert filled_with(optimizer) == {7.0}, case
        now = optimizer.local.state_tensors()
        assert all(torch.equal(mine, before) for mine, before in zip(now, state, strict=True)), case
    return found


def test_a_flipped_bit_is_refused_and_names_the_record_and_the_last_good_generation(tmp_path: Path):
    zerolab.launch(save_numbers, 2, tmp_path / "saved", range(3), keep=3)
    keys = ["model.0.weight", "optimizer.0.weight.exp_avg", "extra.0", "extra.1"]
    folders, expected = {}, {}
    for key in keys:
        folders[key] = shutil.copytree(tmp_path / "saved", tmp_path / key)
        name = flip_in(folders[key] / "generation-000003", key)
        expected[key] = (name + ": its checksum is wrong", "generation-000002")
    both = folders["both"] = shutil.copytree(tmp_path / "saved", tmp_path / "both")
    name = flip_in(both / "generation-000003", "model.1.bias")
    flip_in(both / "generation-000002", "model.1.bias")
    expected["both"] = (name + ": its checksum is wrong", "generation-000001")
    listed = folders["manifest"] = shutil.copytree(tmp_path / "saved", tmp_path / "listed")
    flip(listed / "generation-000003" / "manifest.pt", 700)
    expected["manifest"] = ("manifest.pt is damaged: the checksum of its", "generation-000002")
    old = folders["a file of another generation"] = shutil.copytree(tmp_path / "saved", tmp_path / "old")
    shutil.copy(old / "generation-000002" / "__1_0.distcp", old / "generation-000003" / "__1_0.distcp")
    expected["a file of another generation"] = ("__1_0.distcp: its checksum is wrong", "generation-000002")

    first, second = zerolab.launch(load_all, 2, folders)
    assert first == second
    for case, (problem, good) in expected.items():
        way_out = f"The last good generation is {folders[case] / good}: load it by that path"
        assert first[case].startswith("OSError: ") and problem in first[case], (case, first[case])
        assert first[case].endswith(way_out), (case, first[case])


def rank_that_is_blamed(folder: Path) -> int:
    with pytest.raises(OSError, match="is damaged") as caught:
        zerolab.load(build(), folder)
    return caught.value.raised_on  # a launch reads there whose error it is


def test_every_rank_knows_which_one_has_found_the_damage(tmp_path: Path):
    """Each rank verifies a part of the records: the last one is rank 1's."""
    zerolab.launch(save_numbers, 2, tmp_path, range(1))
    flip_in(tmp_path / "generation-000001", "extra.1")
    assert zerolab.launch(rank_that_is_blamed, 2, tmp_path) == [1, 1]


def test_where_no_generation_is_good_the_error_says_so(tmp_path: Path):
    zerolab.launch(save_numbers, 2, tmp_path, range(1))
    flip_in(tmp_path / "generation-000001", "model.0.bias")
    first, second = zerolab.launch(load_all, 2, {"only": tmp_path})
    assert first == second
    assert re.search(r"model.0.bias.*There is no other good generation: .* copy it again", first["only"])


def load_flipped(folder: Path, flips: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """On a rank: load once for each flipped bit; those that loaded something else than was saved."""
    optimizer, wrong = of_few(), []
    good = zerolab.load(optimizer, folder), contents(optimizer)
    for name, offset, bit in flips:
        flip(folder / name, offset, bit)
        try:
            got = zerolab.load(optimizer, folder / "generation-000001"), contents(optimizer)
        except OSError:
            got = good
        if got != good:
            wrong.append((name, offset, bit))
        flip(folder / name, offset, bit)
    return wrong


def of_few() -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    return build(model=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


def contents(optimizer: zerolab.ZeroOptimizer) -> list:
    with optimizer.full_params():
        parameters = [p.tolist() for p in optimizer.model.parameters()]
    state = [value.tolist() for value in optimizer.local.state_tensors()]
    return [
        parameters,
        state,
        [b.tolist() for b in optimizer.model.buffers()],
        optimizer.param_groups[0]["lr"],
    ]


def save_few(folder: Path) -> bytes:
    """On a rank: save a small model; returns the bytes of its weight."""
    optimizer = of_few()
    zerolab.save(optimizer, folder, extra={"step": 3, "losses": [0.5, 0.25]})
    with optimizer.full_params():
        return optimizer.model[0].weight.detach().numpy().tobytes()


def test_any_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path):
    """In the values, and in what surrounds them: the headers of files and records, and the manifest."""
    (weight,) = zerolab.launch(save_few, 1, tmp_path)
    sizes = [(str(p.relative_to(tmp_path)), p.stat().st_size) for p in tmp_path.rglob("*-000001/*")]
    chance = random.Random(0)
    chosen = [chance.choice([each for each in sizes if ".metadata" not in each[0]]) for _ in range(FLIPS)]
    flips = [(name, chance.randrange(size), 1 << chance.randrange(8)) for name, size in chosen]
    places = {name: (tmp_path / name).read_bytes().find(weight) for name, _ in sizes}
    ((file, start),) = [(name, place) for name, place in places.items() if place >= 0]
    flips += [(file, start + byte, 1 << chance.randrange(8)) for byte in range(len(weight))]
    assert zerolab.launch(load_flipped, 1, tmp_path, flips) == [[]]


def save_without_checksums_of_torchs(folder: Path) -> str:
    torch.serialization.set_crc32_options(False)
    save_numbers(folder, range(1))
    return outcome(lambda: zerolab.load(build(), folder))


def test_the_checksums_are_our_own_and_no_setting_turns_them_off(tmp_path: Path):
    assert zerolab.launch(save_without_checksums_of_torchs, 1, tmp_path) == ["done"]


def of_older_formats(folder: Path) -> dict[str, tuple[Path, str]]:
    """Folders as earlier versions have left them, and what is said of each."""
    first, second, third = (folder / f"format {number}" for number in (1, 2, 3))
    (first / "generation-000004").mkdir(parents=True)
    (first / "generation-000004" / ".metadata").write_bytes(b"")
    (second / "generation-000004").mkdir(parents=True)
    for path in (first, second):
        (path / "LATEST").write_text("generation-000004")
    manifest.write(second / "generation-000004", {"format": 2, "tensors": {}, "records": []})
    manifest.write(third, {"format": 99, "tensors": {}, "records": []})
    refused = "of format 1 or 2, and this version reads format 3: load it with the version of zerolab that"
    return {
        "1": (first, f"ValueError: {first} is {refused}"),
        "1, by its path": (first / "generation-000004", "FileNotFoundError: .* or of format 1, which had no"),
        "2": (second, f"ValueError: {second} is {refused}"),
        "2, by its path": (
            second / "generation-000004",
            "ValueError: .* is of format 2, and this version reads",
        ),
        "99": (third, "ValueError: .* is of format 99, and this version reads format 3: load it with"),
    }


def test_a_checkpoint_of_another_format_is_refused_by_its_number(tmp_path: Path):
    (tmp_path / "format 3").mkdir()
    cases = of_older_formats(tmp_path)
    (found,) = zerolab.launch(load_all, 1, {case: folder for case, (folder, _) in cases.items()})
    for case, (_, expected) in cases.items():
        assert re.match(expected, found[case]), (case, found[case])


def test_no_flipped_bit_in_latest_names_another_generation(tmp_path: Path):
    """Of 000005 one bit makes 000001, 000004 and 000007, all of them whole."""
    zerolab.launch(save_numbers, 1, tmp_path, range(7), keep=7)
    shutil.rmtree(tmp_path / "generation-000007")
    shutil.rmtree(tmp_path / "generation-000006")
    latest = tmp_path / "LATEST"
    generations.commit(tmp_path / "generation-000005", keep=7)
    assert generations.find(tmp_path).name == "generation-000005"
    for offset in range(latest.stat().st_size):
        for bit in range(8):
            flip(latest, offset, 1 << bit)
            with pytest.raises(
                OSError, match=r"LATEST is damaged; complete generations: generation-000005, .*-000001"
            ):
                generations.find(tmp_path)
            flip(latest, offset, 1 << bit)
    latest.write_bytes(latest.read_bytes()[:20])
    with pytest.raises(OSError, match="LATEST is damaged"):
        generations.find(tmp_path)


def save_over_a_damaged_latest(folder: Path) -> str:
    optimizer = build()
    zerolab.save(optimizer, folder)
    flip(folder / "LATEST", 16, 1)
    zerolab.save(optimizer, folder)
    return outcome(lambda: zerolab.load(optimizer, folder))


def test_the_next_save_writes_a_damaged_latest_anew(tmp_path: Path):
    assert zerolab.launch(save_over_a_damaged_latest, 1, tmp_path) == ["done"]
