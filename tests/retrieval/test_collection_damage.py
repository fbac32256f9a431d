"""A flipped bit or a cut in any file of a collection: an error that names the collection, or the same results."""

import random
import shutil

import pytest

from conjoin.retrieval import Collection, encode_collection, open_collection
from conjoin.retrieval.collection import published_version
from conjoin.storage import DamagedError
from damage import wrong_after_damage
from tiny_collections import clustered, files, lookup_encoder, lookup_rows, made

VECTORS, QUERIES = clustered(300, 8), clustered(4, 8, seed=1)
KINDS = ("data/train.lance/data", "data/train.lance/_versions", "data/train.lance/_deletions",
         "data/train.lance/_indices", "data/train.lance/_transactions", "data/train.lance/_refs", "SHA256SUMS",
         "skipped.jsonl")  # fmt: skip
FLIPS, CUTS = 2, 1
"""In each file."""


def kept(number):
    return {"price": number % 9, "label": f"l {number % 5}"}


def answers(folder):
    """All that can be asked of a collection."""
    collection = Collection(folder)
    ids = collection.ids
    found = [collection.rank(QUERIES, 7), collection.rank(QUERIES, 7, where="price < 4", exact=True)]
    found.append(collection.rank(QUERIES, 7, words=["17"] * len(QUERIES)))
    rows = collection.rows(ids)
    vectors = collection.vectors().tobytes()
    return ids, vectors, rows, [(each.ids, each.scores.tolist()) for each in found], collection.select("label = 'l 3'")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A collection with all that one can have: several files, removed and skipped rows, indexes, earlier versions."""
    folder = tmp_path_factory.mktemp("whole") / "it"
    made(folder, VECTORS, kept, count=200)
    collection = Collection(folder)
    collection.index("ivf_flat", probes=100)
    collection.remove(["doc/00005", "doc/00006"])
    rows = [*lookup_rows(300, kept=kept)[10:], {"id": "bad", "problem": "it is broken"}]
    encode_collection(rows, lookup_encoder(VECTORS), folder, on_error="skip")
    return folder


def damaged(folder, name, read, right, is_named=True):
    def ends(content):
        return random.Random(name).sample(range(len(content)), min(CUTS, len(content)))

    path = folder / name
    named = str(folder) if is_named else ""
    return wrong_after_damage(path, lambda: read(folder), right, path.name, FLIPS, ends, named)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.slow
def test_damage_is_named_or_harmless(is_large, whole, tmp_path, monkeypatch):
    if is_large:  # as a collection of which only newer files are hashed
        monkeypatch.setattr("conjoin.retrieval.collection._SMALL", 0)
    folder = tmp_path / "it"
    shutil.copytree(whole, folder)
    right = answers(folder)
    assert right == answers(whole) and len(right[0]) == 298
    names = [*files(folder)]
    assert all(any(name.startswith(kind) for name in names) for kind in KINDS), names
    wrong, noticed, tries = [], {}, 0
    for name in names:
        found, count, all_ = damaged(folder, name, answers, right)
        wrong, tries = wrong + found, tries + all_
        noticed[name] = count / all_
    assert answers(folder) == right
    assert not wrong, "\n".join(wrong)
    assert tries > 100
    unhashed = ("_refs", "_hint")
    hashed = [name for name in names if name.startswith("data/") and not any(word in name for word in unhashed)]
    assert [name for name in hashed if noticed[name] < 1] == []


@pytest.mark.parametrize("name", ["SHA256SUMS", "data/train.lance/_refs", "data"])
def test_missing_parts(name, whole, tmp_path):
    folder = tmp_path / "it"
    shutil.copytree(whole, folder)
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises((ValueError, OSError), match=str(folder)) as raised:
        answers(folder)
    assert not isinstance(raised.value, DamagedError), "no checksum differs"


def test_a_writer_does_not_hide_damage(whole, tmp_path):
    """A new publication would give damaged files new checksums."""
    encoder = lookup_encoder(VECTORS)
    for number, path in enumerate(sorted((whole / "data/train.lance/data").iterdir())):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        collection, broken = Collection(folder), folder / path.relative_to(whole)
        content = bytearray(broken.read_bytes())
        content[len(content) // 2] ^= 1
        broken.write_bytes(bytes(content))
        for use in (
            lambda folder=folder: encode_collection(lookup_rows(300), encoder, folder, sync=True),
            lambda collection=collection: collection.remove([collection.ids[0]]),
            lambda collection=collection: collection.index(None),
            lambda folder=folder: Collection(folder).index_faiss(),
        ):
            with pytest.raises(DamagedError, match=rf"{broken.name}' is missing, truncated or damaged: it differs"):
                use()


def test_verify_hashes_what_opening_passes_over(whole, tmp_path, monkeypatch):
    """A file that kept its size and time is hashed again by `verify` alone."""
    import os

    monkeypatch.setattr("conjoin.retrieval.collection._SMALL", 0)
    folder = tmp_path / "it"
    shutil.copytree(whole, folder)
    collection = Collection(folder)
    collection.verify()
    path = next((folder / "data/train.lance/data").iterdir())
    content, found = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    Collection(folder)
    with pytest.raises(DamagedError, match=f"{path.name}' is missing, truncated or damaged"):
        collection.verify()


class TestFaiss:
    @pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "HNSW8"])
    def test_damage_is_named_or_harmless(self, factory, tmp_path):
        pytest.importorskip("faiss")
        folder = tmp_path / "it"
        made(folder, VECTORS, kept)
        Collection(folder).index_faiss(factory, probes=100)

        def read_any(folder):
            found = open_collection(folder).rank(QUERIES, 7)
            return found.ids, found.scores.round(5).tolist()

        wrong, right, noticed = [], read_any(folder), 0
        for path in sorted((folder / "faiss").iterdir()):
            found, count, _ = damaged(folder, f"faiss/{path.name}", read_any, right)
            wrong, noticed = wrong + found, noticed + count
        assert noticed >= 12 and read_any(folder) == right
        assert not wrong, "\n".join(wrong)

    def test_a_damaged_tag_beside_an_index_is_an_error_that_names_the_collection(self, tmp_path):
        pytest.importorskip("faiss")
        made(tmp_path, VECTORS[:50])
        Collection(tmp_path).index_faiss("Flat")
        path = tmp_path / "data/train.lance/_refs/tags/published.json"
        for content in (b"", b"nonsense", path.read_bytes()[:-4]):
            path.write_bytes(content)
            for use in (open_collection, published_version):
                with pytest.raises(OSError, match=f"the collection '{tmp_path}' cannot be read"):
                    use(tmp_path)
