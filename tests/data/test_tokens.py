"""Token streams, text, tokenizers and files of tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import TokenizerConfig
from elaswave_fx.data import BpeTokenizer, ByteTokenizer, open_data
from elaswave_fx.data.corpus import file_documents, matching_files, stdlib_documents
from elaswave_fx.data.token_files import open_token_files
from elaswave_fx.data.tokenizer import make_tokenizer
from elaswave_fx.data.tokens import ArrayTokens, JoinedTokens, PiecedTokens, TokenDataset
from elaswave_fx.errors import ConfigError, DataError


def test_windows_and_their_next_tokens() -> None:
    dataset = TokenDataset(ArrayTokens(np.arange(10, 21, dtype=np.uint16)), 4, None, "test")
    assert len(dataset) == 2
    sample = dataset.sample(1)
    assert sample["input_ids"].tolist() == [14, 15, 16, 17]
    assert sample["labels"].tolist() == [15, 16, 17, 18]
    assert sample["input_ids"].dtype == torch.int64
    assert dataset.vocab_size == 21
    batch = dataset.batch(np.array([1, 0]))
    assert torch.equal(batch["labels"][0], sample["labels"])
    assert batch["input_ids"].is_contiguous()


def test_too_few_tokens() -> None:
    with pytest.raises(DataError, match=r"^seq_len=8: x holds 8 tokens, one sample needs 9; nearest valid: seq_len=7$"):
        TokenDataset(ArrayTokens(np.zeros(8, np.uint8)), 8, None, "x")
    with pytest.raises(DataError, match="x holds 0 tokens, one sample needs 9; give more data"):
        TokenDataset(ArrayTokens(np.zeros(0, np.uint8)), 8, None, "x")


def test_token_out_of_range() -> None:
    dataset = TokenDataset(ArrayTokens(np.array([0, 1, 2, 3, 9])), 2, 5, "x")
    assert dataset.sample(0)["labels"].tolist() == [1, 2]
    with pytest.raises(DataError, match=r"data.vocab_size=5: x holds token 9 in sample 1; nearest valid: 10"):
        dataset.sample(1)


@given(data=st.data(), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_pieces_and_joints_read_like_one_array(data: st.DataObject, lengths: list[int]) -> None:
    order = data.draw(st.permutations(range(len(lengths))))
    tokens = np.arange(sum(lengths))
    starts_by_piece = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    starts = starts_by_piece[list(order)]
    taken = np.array(lengths)[list(order)]
    whole = np.concatenate([tokens[a : a + n] for a, n in zip(starts, taken, strict=True)])
    pieced = PiecedTokens(tokens, starts, taken)
    joined = JoinedTokens([ArrayTokens(tokens[a : a + n]) for a, n in zip(starts, taken, strict=True)])
    lo = data.draw(st.integers(0, len(whole)))
    hi = data.draw(st.integers(lo, len(whole)))
    for stream in (pieced, joined):
        assert len(stream) == len(whole)
        assert stream.read(lo, hi).tolist() == whole[lo:hi].tolist()


def test_bytes_round_trip_with_end_marks() -> None:
    tokens = ByteTokenizer().encode(["añ".encode(), b"", b"c"])
    assert tokens.tolist() == [97, 0xC3, 0xB1, 0, 0, 99, 0]
    assert ByteTokenizer().decode(tokens.tolist()) == "añc"


TEXT = [b"def area(width, height):\n    return width * height\n" * 20, "naïve <|end|> text\n".encode() * 5]


def test_bpe_is_deterministic_and_loses_nothing() -> None:
    first, second = BpeTokenizer.train(TEXT, 300), BpeTokenizer.train(TEXT, 300)
    assert first.serialized() == second.serialized()
    assert first.key == second.key
    assert 257 < first.vocab_size <= 300
    tokens = first.encode(TEXT)
    assert tokens.dtype == np.uint16
    assert len(tokens) < sum(map(len, TEXT)) / 2
    assert (tokens == 0).sum() == len(TEXT)  # a text that spells the end mark does not end
    assert first.decode(tokens.tolist()) == b"".join(TEXT).decode()


def test_bpe_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TokenizerConfig(kind="bpe", vocab_size=280)
    trained = make_tokenizer(config, TEXT, tmp_path)
    monkeypatch.setattr(BpeTokenizer, "train", lambda *_: pytest.fail("trained again"))
    assert make_tokenizer(config, TEXT, tmp_path).key == trained.key
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        make_tokenizer(config, [*TEXT, b"more"], tmp_path)


def test_stdlib_documents() -> None:
    documents = stdlib_documents(1.5)
    assert sum(map(len, documents)) == 1_500_000
    assert documents == stdlib_documents(1.5)
    assert any(b"class ABCMeta" in document for document in documents)


def test_stdlib_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=f"data=stdlib: no Python sources in {tmp_path}; nearest valid: data=files"):
        stdlib_documents(None)


def test_files_by_pattern_folder_and_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden", "deep/.git/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    names = lambda *patterns: [str(path.relative_to(tmp_path)) for path in matching_files(patterns)]  # noqa: E731
    assert names(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert names(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "deep/c.txt"]
    assert names(str(tmp_path)) == ["a.txt", "b.txt", "deep/c.txt"]
    assert names(f"{tmp_path}/b.txt", f"{tmp_path}/*.txt") == ["b.txt", "a.txt"]
    assert file_documents([str(tmp_path)], 7e-6) == [b"a.txt", b"b."]


def test_folders_are_read_behind_links(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "y.txt").write_text("far away")
    folder = tmp_path / "here"
    (folder / "a").mkdir(parents=True)
    for name in ("x.txt", "#x.txt", "x.txt~", "#x.txt#", ".hidden", "x.txt.swp"):
        (folder / "a" / name).write_text("here")
    (folder / "part").symlink_to(tmp_path / "far")
    (folder / "a" / "around").symlink_to(folder)
    names = [path.relative_to(folder).as_posix() for path in matching_files([str(folder)])]
    assert names == ["a/#x.txt", "a/x.txt", "part/y.txt"]
    (folder / "latest").symlink_to("a")
    (folder / "b.txt").symlink_to(Path("a") / "x.txt")
    for pattern in (str(folder), f"{folder}/**/*.txt"):
        names = [path.name for path in matching_files([pattern])]
        assert len(names) == 3, "a file counts once"
    with pytest.raises(DataError, match="is named twice"):
        matching_files([f"{folder}/a", f"{folder}/a/../latest"])
    (folder / "a" / "z.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"z.txt: is a link to .*nothing, which is not there"):
        matching_files([str(folder)])


def test_numbers_in_names_are_in_order_of_their_values(tmp_path: Path) -> None:
    for number in (10, 2, 1, 11):
        (tmp_path / f"day-{number}.txt").write_text("text")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("text")
    names = [path.name for path in matching_files([str(tmp_path)])]
    assert names == ["z.txt", "day-1.txt", "day-2.txt", "day-10.txt", "day-11.txt"]


def test_a_limit_cuts_between_characters(tmp_path: Path) -> None:
    text = "äöü€ 漢字 😀 text " * 20
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for limit in range(4, 80):
        (document,) = file_documents([str(tmp_path / "a.txt")], limit / 1e6)
        assert text.startswith(document.decode()) and limit - 5 < len(document) <= limit
    (tmp_path / "a.txt").write_bytes(b"\xa0" * 40)
    assert len(file_documents([str(tmp_path / "a.txt")], 20 / 1e6)[0]) == 20


def test_files_that_would_be_read_otherwise_than_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text " * 10_000 + b"\0" + b"text")
    with pytest.raises(DataError, match="a.txt: is no text, it has a byte of 0"):
        file_documents([str(tmp_path / "a.txt")], None)
    with pytest.raises(DataError, match="a.txt: is named twice, and files are read once"):
        matching_files([str(tmp_path / "a.txt")] * 2)


def test_files_missing_or_empty(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"")
    with pytest.raises(DataError, match=f"no such file, folder or pattern; nearest valid: {tmp_path}/notes.txt"):
        matching_files([f"{tmp_path}/note.txt"])
    with pytest.raises(DataError, match="/nowhere is no folder"):
        matching_files(["/nowhere/a.txt"])
    with pytest.raises(DataError, match="all files are empty"):
        file_documents([str(tmp_path)], None)


def test_text_files_through_bpe_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT[0])
    overrides = [
        "data=files",
        f"data.paths=[{tmp_path}/a.txt]",
        "tokenizer=bpe",
        "tokenizer.vocab_size=270",
        "seq_len=8",
    ]
    config = load_config([*overrides, f"cache.dir={tmp_path}/cache"])
    dataset = open_data(config)
    assert dataset.vocab_size == 270
    monkeypatch.setattr(BpeTokenizer, "encode", lambda *_: pytest.fail("encoded again"))
    assert torch.equal(open_data(config).sample(3)["labels"], dataset.sample(3)["labels"])
    monkeypatch.undo()
    uncached = open_data(load_config([*overrides, "cache.enabled=false"]))
    assert torch.equal(uncached.sample(3)["labels"], dataset.sample(3)["labels"])
    for broken in (tmp_path / "cache").rglob("*.npy"):
        broken.write_bytes(b"not an array")
    assert torch.equal(open_data(config).sample(3)["labels"], dataset.sample(3)["labels"])


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT[0])
    overrides = [
        "data=files",
        f"data.paths=[{tmp_path}/a.txt]",
        "tokenizer=bpe",
        "tokenizer.vocab_size=270",
        "seq_len=8",
    ]
    with pytest.raises(ConfigError, match=f"cache.dir={tmp_path}/a.txt: cannot be written"):
        open_data(load_config([*overrides, f"cache.dir={tmp_path}/a.txt"]))


def test_flat_token_files(tmp_path: Path) -> None:
    np.arange(70_000, 70_010, dtype="<u4").tofile(tmp_path / "a.bin")
    np.arange(5, dtype="<u4").tofile(tmp_path / "b.bin")
    stream = open_token_files([f"{tmp_path}/*.bin"], "uint32")
    assert stream.read(8, 12).tolist() == [70_008, 70_009, 0, 1]
    config = load_config(["data=memmap", f"data.paths={tmp_path}", "data.dtype=uint32", "seq_len=7"])
    dataset = open_data(config)
    assert (len(dataset), dataset.vocab_size) == (2, 70_010)
    assert dataset.sample(1)["labels"].tolist() == [70_008, 70_009, 0, 1, 2, 3, 4]


def test_flat_token_files_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="its 3 bytes are no whole number of uint16 tokens"):
        open_token_files([f"{tmp_path}/odd.bin"], "uint16")
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty.bin: is empty"):
        open_token_files([f"{tmp_path}/empty.bin"], "uint16")
    with pytest.raises(DataError, match=f"no such file, folder or pattern; nearest valid: {tmp_path}/odd.bin"):
        open_token_files([f"{tmp_path}/od.bin"], "uint16")


def write_megatron(
    prefix: Path, sequences: list[list[int]], dtype: str = "<u2", code: int = 8, shuffled: bool = False
) -> None:
    """A pair of files in Megatron-LM's public format; `shuffled` stores the sequences in reverse."""
    stored = list(reversed(sequences)) if shuffled else sequences
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(tokens, dtype).tobytes() for tokens in stored))
    width = np.dtype(dtype).itemsize
    lengths = [len(tokens) for tokens in stored]
    offsets = [width * sum(lengths[:place]) for place in range(len(lengths))]
    if shuffled:
        lengths, offsets = lengths[::-1], offsets[::-1]
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + (1).to_bytes(8, "little")
        + bytes([code])
        + len(sequences).to_bytes(8, "little")
        + (len(sequences) + 1).to_bytes(8, "little")
        + np.array(lengths, "<i4").tobytes()
        + np.array(offsets, "<i8").tobytes()
        + np.arange(len(sequences) + 1, dtype="<i8").tobytes()
    )


SEQUENCES = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("dtype", "code"), [("<u1", 1), ("<i4", 4), ("<i8", 5), ("<u2", 8)])
def test_megatron_files(tmp_path: Path, dtype: str, code: int, shuffled: bool) -> None:
    write_megatron(tmp_path / "corpus", SEQUENCES, dtype, code, shuffled)
    for path in ("corpus.bin", "corpus", "*"):
        stream = open_token_files([f"{tmp_path}/{path}"], "uint16")
        assert stream.read(0, len(stream)).tolist() == list(range(1, 11))
    config = load_config(["data=memmap", f"data.paths={tmp_path}/corpus", "seq_len=3"])
    assert open_data(config).sample(2)["labels"].tolist() == [8, 9, 10]


def test_an_index_of_fairseq_is_named(tmp_path: Path) -> None:
    tokens = np.arange(600, dtype="<u2")
    tokens.tofile(tmp_path / "a.bin")
    sizes, offsets = np.full(200, 3, "<i4"), np.arange(200, dtype="<i8") * 6
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8]) + (200).to_bytes(8, "little")
    (tmp_path / "a.idx").write_bytes(head + sizes.tobytes() + offsets.tobytes())
    with pytest.raises(DataError, match="is an index of fairseq, which knows no documents; save"):
        open_token_files([str(tmp_path / "a.bin")], "uint16")


def test_megatron_files_that_cannot_be(tmp_path: Path) -> None:
    index = tmp_path / "corpus.idx"

    def refused(change: bytes) -> str:
        index.write_bytes(change)
        with pytest.raises(DataError) as caught:
            open_token_files([f"{tmp_path}/corpus"], "uint16")
        return str(caught.value)

    write_megatron(tmp_path / "corpus", SEQUENCES)
    good = index.read_bytes()
    assert "is no Megatron index" in refused(b"something else")
    assert "has version 2, only version 1 is known" in refused(good[:9] + b"\x02" + good[10:])
    assert "has type code 7; tokens are [1,2,3,4,5,8]" in refused(good[:17] + b"\x07" + good[18:])
    assert "is cut off, 4 sequences and 5 bounds need more bytes" in refused(good[:-1])
    assert "negative length" in refused(good[:34] + b"\xff\xff\xff\xff" + good[38:])
    index.write_bytes(good)
    (tmp_path / "corpus.bin").write_bytes(b"\x00" * 8)
    assert "is cut off, its index names tokens behind its end" in refused(good)
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(DataError, match=r"names .idx files alone; name the .bin beside them"):
        open_token_files([f"{tmp_path}/*.idx"], "uint16")


@pytest.mark.parametrize("encoding", ["latin-1", "cp1251", "shift_jis"])
def test_text_that_is_not_utf_8_is_refused_by_a_tokenizer_that_is_trained(encoding: str) -> None:
    text = {"latin-1": "été", "cp1251": "привет", "shift_jis": "日本語"}[encoding] * 90
    with pytest.raises(DataError, match=r"^tokenizer=bpe: a text is not UTF-8, it has the byte 0x.. at 0; convert it"):
        BpeTokenizer.train([text.encode(encoding)], 300)
