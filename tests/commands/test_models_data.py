"""The promise: real text and plain models that every rank, and a single process, can rebuild exactly."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zerolab import data, models


@pytest.fixture(scope="module")
def source() -> bytes:
    return data.text(200_000)


# --- models ---


def test_gpt_gives_a_loss_with_targets_and_logits_without():
    gpt = models.GPT(vocab=11, width=16, depth=2, heads=2, context=8)
    tokens = torch.arange(12).view(2, 6) % 11
    assert gpt(tokens).shape == (2, 6, 11)
    assert gpt(tokens, tokens).shape == ()
    # Small weights at the start: every symbol is about equally likely.
    assert gpt(tokens, tokens).item() == pytest.approx(math.log(11), abs=0.1)


def test_gpt_is_causal():
    gpt = models.GPT(vocab=11, width=16, depth=2, heads=2, context=8)
    tokens = torch.arange(8).view(1, 8) % 11
    changed = tokens.clone()
    changed[0, 5:] = 0
    before, after = gpt(tokens), gpt(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_tied_head_is_the_embedding_and_counts_once():
    sizes = {"vocab": 11, "width": 16, "depth": 1, "heads": 2, "context": 8}
    tied, untied = models.GPT(**sizes, tied=True), models.GPT(**sizes)
    assert tied.head.weight is tied.embedding.weight
    count = {model: sum(p.numel() for p in model.parameters()) for model in (tied, untied)}
    assert count[untied] - count[tied] == 11 * 16


def test_generate_calls_the_module_and_so_its_hooks():
    gpt = models.GPT(vocab=11, width=16, depth=1, heads=2, context=4)
    calls = []
    gpt.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
    out = gpt.generate(torch.tensor([[1, 2]]), 5, generator=torch.Generator().manual_seed(3))
    assert out.shape == (1, 7)
    assert calls == [2, 3, 4, 4, 4], "one call per symbol, on a window no longer than the context"
    again = gpt.generate(torch.tensor([[1, 2]]), 5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(out, again)


def test_temperature_zero_takes_the_likeliest():
    gpt = models.GPT(vocab=11, width=16, depth=1, heads=2, context=4)
    prompt = torch.tensor([[1, 2]])
    assert gpt.generate(prompt, 1, temperature=0)[0, 2] == gpt(prompt)[0, -1].argmax()


def test_softmax_regression_has_two_parameters_with_short_names():
    model = models.make("logistic")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {"weight": (10, 784), "bias": (10,)}
    x, y = torch.zeros(3, 784), torch.tensor([0, 1, 2])
    assert model(x).shape == (3, 10)
    torch.testing.assert_close(model(x, y), torch.nn.functional.cross_entropy(model(x), y))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("logistic", 7850, 7850), ("gpt-tiny", 200_000, 900_000), ("gpt-11m", 11_000_000, 12_000_000)],
)
def test_models_by_name_have_the_promised_size(name, low, high):
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in models.make(name).parameters())
    assert low <= numel <= high


def test_bad_models_say_what_would_be_good():
    with pytest.raises(ValueError, match=r"unknown model 'gpt-9000'.*logistic, gpt-tiny, gpt-11m"):
        models.make("gpt-9000")
    with pytest.raises(ValueError, match=r"width=10 .*heads=3.*multiple of 3"):
        models.GPT(width=10, heads=3)
    with pytest.raises(ValueError, match=r"depth=0 .*at least 1"):
        models.GPT(depth=0)
    gpt = models.GPT(vocab=11, width=16, depth=1, heads=2, context=4)
    with pytest.raises(ValueError, match=r"5 tokens exceed context=4"):
        gpt(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"temperature=nan"):
        gpt.generate(torch.zeros(1, 1, dtype=torch.long), 1, temperature=math.nan)


# --- text ---


def test_text_is_python_source_of_the_size_asked_for():
    assert len(data.text(5000)) == 5000
    assert data.text(10_000).startswith(data.text(5000))
    assert b"\nimport " in data.text() and b"\n    def " in data.text()
    assert len(data.text()) == 1_000_000


def test_text_and_batches_are_the_same_in_another_process():
    program = (
        "import hashlib, torch; from zerolab import data; t = data.text(50_000);"
        "a, b = data.NextByte(t, 16, 4, seed=5).batch(3, 2); c, d = data.NextKind(t, 4, seed=5).batch(3, 2);"
        "print(hashlib.sha256(t + b''.join(x.numpy().tobytes() for x in (a, b, c, d))).hexdigest())"
    )
    root = str(Path(data.__file__).parents[1])
    digests = set()
    for hash_seed in ("1", "2"):  # str hashes differ between processes; the batches must not
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": root}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_modules_that_are_absent_are_skipped(monkeypatch):
    monkeypatch.setattr(data, "SOURCES", "argparse no_such_module textwrap")
    data.text.cache_clear()
    both = data.text()
    monkeypatch.setattr(data, "SOURCES", "no_such_module")
    data.text.cache_clear()
    with pytest.raises(FileNotFoundError, match="installed without it"):
        data.text()
    data.text.cache_clear()
    assert b"ArgumentParser" in both and b"def dedent" in both


def test_split_keeps_every_byte_once(source):
    train, held_out = data.split(source)
    assert train + held_out == source
    assert len(held_out) == len(source) // 10


def test_unigram_entropy_of_known_texts():
    assert data.unigram_entropy(b"aaaa") == 0
    assert data.unigram_entropy(b"abab") == pytest.approx(math.log(2))
    assert 2.5 < data.unigram_entropy(data.text()) < math.log(256)


def test_bad_sizes_say_what_would_be_good():
    for bad in (0, -5, 1.5, True):
        with pytest.raises(ValueError, match=rf"max_bytes={bad} .*at least 1"):
            data.text(bad)
    with pytest.raises(ValueError, match=r"held_out=1"):
        data.split(b"abc", 1)
    with pytest.raises(ValueError, match=r"16 bytes has no window of 17"):
        data.NextByte(b"a" * 16, context=16)
    with pytest.raises(ValueError, match=r"8 bytes has no example.*at least 9"):
        data.NextKind(b"a" * 8)


# --- batches ---


@pytest.mark.parametrize("make", [data.NextByte, data.NextKind])
def test_batches_depend_on_seed_step_and_rank_and_on_nothing_else(source, make):
    first, second = make(source, seed=1), make(source, seed=1)
    second.batch(9, 9)  # what was drawn before must not matter
    for one, other in zip(first.batch(2, 1), second.batch(2, 1), strict=True):
        assert torch.equal(one, other)
    batches = [first.batch(step, rank)[0] for step in range(4) for rank in range(4)]
    batches.append(make(source, seed=2).batch(0, 0)[0])
    for i, one in enumerate(batches):
        assert not any(torch.equal(one, other) for other in batches[i + 1 :])


def test_targets_are_the_next_bytes(source):
    tokens, targets = data.NextByte(source, context=32, batch_size=5).batch(0, 0)
    assert tokens.shape == targets.shape == (5, 32)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert bytes(torch.cat([tokens[0], targets[0, -1:]]).tolist()) in source


def test_every_start_can_be_drawn_and_none_beyond():
    tokens, targets = data.NextByte(b"abcd", context=2, batch_size=200).batch(0, 0)
    windows = {bytes(w.tolist()) for w in torch.cat([tokens, targets[:, -1:]], dim=1)}
    assert windows == {b"abc", b"bcd"}


def test_features_are_eight_one_hot_characters_of_98_symbols(source):
    features, kinds = data.NextKind(source, batch_size=64).batch(0, 0)
    assert features.shape == (64, 784) and features.dtype == torch.float32
    one_hot = features.view(64, 8, 98)
    assert torch.equal(one_hot.sum(dim=2), torch.ones(64, 8))
    assert set(features.unique().tolist()) == {0.0, 1.0}
    assert kinds.shape == (64,) and kinds.dtype == torch.int64


def test_features_and_kind_spell_the_text():
    features, kinds = data.NextKind(b"def f(x)\n", batch_size=1).batch(0, 0)
    symbols = features.view(8, 98).argmax(dim=1).tolist()
    assert bytes(data.SYMBOLS[symbol] for symbol in symbols) == b"def f(x)"
    assert data.KINDS[kinds.item()] == "newline"


@pytest.mark.parametrize(
    ("characters", "expected"),
    [
        ("az", "lower case"),
        ("AZ", "upper case"),
        ("09", "digit"),
        (" ", "space"),
        ("\n", "newline"),
        ("_", "underscore"),
        ("([{", "opening bracket"),
        (")]}", "closing bracket"),
        ("'\"", "quote"),
        ("\t#=.,:@\x00\xe9", "other"),
    ],
)
def test_kinds_of_characters(characters, expected):
    assert {data.KINDS[data.KIND_OF_BYTE[ord(character)]] for character in characters} == {expected}


def test_symbols_are_98_and_unknown_bytes_share_the_last():
    assert data.SYMBOL_COUNT == 98
    assert sorted(data.SYMBOL_OF_BYTE.unique().tolist()) == list(range(98))
    assert data.SYMBOL_OF_BYTE[[0, 13, 200, 255]].tolist() == [97] * 4


def test_every_kind_occurs_and_none_is_nearly_all(source):
    shares = data.KIND_OF_BYTE[list(source)].bincount(minlength=10) / len(source)
    assert shares.min() > 0.001
    assert shares.max() < 0.7
    assert data.NextKind(source).entropy() == pytest.approx(-(shares * shares.log()).sum().item(), rel=1e-5)
