"""Every backend refuses bad arguments, and is saved and loaded whole."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from index_vectors import IN_MEMORY, clustered, filled, names, unit

from conjoin.retrieval import ExactIndex, ModelIdentity, build_index, encode_corpus, load_index, new_index
from conjoin.storage import StoredFolder
from tiny_encoder import tiny_encoder, tiny_rows


@pytest.mark.parametrize("kind", ["exact", "flat", "hnsw"])
class TestErrors:
    def test_bad_k(self, kind):
        for k in (0, -1, 1.5, True, None):
            with pytest.raises(ValueError, match=f"k must be a positive integer, got {k!r}"):
                filled(kind, unit(5, 8)).search(unit(1, 8), k)

    def test_empty_index(self, kind, tmp_path):
        with pytest.raises(ValueError, match="the index is empty; add embeddings before searching it"):
            new_index(kind).search(unit(1, 8), 1)
        with pytest.raises(ValueError, match="the index is empty; add embeddings before saving it"):
            new_index(kind).save(tmp_path)

    def test_dimension(self, kind):
        index = filled(kind, unit(5, 8))
        with pytest.raises(ValueError, match="the queries have 9 dimensions, the index has 8"):
            index.search(unit(1, 9), 1)
        with pytest.raises(ValueError, match="the embeddings have 9 dimensions, the index has 8"):
            index.add(["new"], unit(1, 9))
        with pytest.raises(ValueError, match=r"queries must be a matrix \(N, D\), got the shape \(8,\)"):
            index.search(unit(1, 8)[0], 1)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_not_finite(self, kind, value):
        index, bad = filled(kind, unit(5, 8)), unit(3, 8)
        bad[1, 4] = value
        with pytest.raises(ValueError, match="query 1 has values that are not finite"):
            index.search(bad, 1)
        with pytest.raises(ValueError, match="the embedding of 'b' has values that are not finite"):
            index.add(["a", "b", "c"], bad)
        assert len(index.ids) == 5

    def test_not_normalised(self, kind):
        index = filled(kind, unit(5, 8))
        with pytest.raises(ValueError, match="query 0 has norm 2, expected an L2-normalised vector"):
            index.search(2 * unit(1, 8), 1)
        with pytest.raises(ValueError, match="the embedding of 'zero' has norm 0, expected"):
            index.add(["zero"], np.zeros((1, 8)))

    def test_ids(self, kind):
        index = filled(kind, unit(5, 8))
        with pytest.raises(ValueError, match="got 2 ids for 3 embeddings"):
            index.add(["a", "b"], unit(3, 8))
        with pytest.raises(ValueError, match="the id 'doc/3' occurs twice"):
            index.add(["a", "doc/3"], unit(2, 8))
        with pytest.raises(ValueError, match="the id 'a' occurs twice"):
            index.add(["a", "a"], unit(2, 8))
        with pytest.raises(ValueError, match=r"ids must be strings, got 7 \(int\)"):
            index.add([7], unit(1, 8))
        assert index.ids == names(5) and len(index.search(unit(1, 8), 9).ids[0]) == 5


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("[!.]*"))}


class TestSaving:
    @pytest.mark.parametrize("kind", IN_MEMORY)
    def test_round_trip(self, kind, tmp_path):
        corpus, queries = clustered(600, 16), clustered(7, 16, seed=1)
        model = ModelIdentity("some/model", "f" * 64)
        options = {"probes": 3, "lists": 4} if kind.startswith("ivfpq") else {}
        index = filled(kind, corpus, model=model, **options)
        index.save(tmp_path / "a" / "b")
        loaded = load_index(tmp_path / "a" / "b")
        assert type(loaded) is type(index) and loaded.kind == kind
        assert (loaded.model, loaded.ids, loaded.dimension) == (model, index.ids, 16)
        before, after = index.search(queries, 9), loaded.search(queries, 9)
        assert after.ids == before.ids
        np.testing.assert_array_equal(after.scores, before.scores)
        loaded.add(["one more"], queries[:1])
        assert loaded.search(queries[:1], 1).ids == [["one more"]] or kind not in ("exact", "flat", "hnsw")

    def test_saving_onto_itself_replaces_everything(self, tmp_path):
        filled("exact", unit(6, 8)).save(tmp_path)
        loaded = load_index(tmp_path)
        loaded.add(["new"], unit(1, 8, seed=5))
        loaded.save(tmp_path)
        assert load_index(tmp_path).ids == [*names(6), "new"]
        filled("flat", unit(3, 8)).save(tmp_path)
        assert load_index(tmp_path).ids == names(3)
        kinds = [(path.name.split("-")[0], path.suffix) for path in sorted(tmp_path.glob("[!.]*"))]
        assert kinds == [("ids", ".json"), ("manifest.json", ".json"), ("vectors", ".faiss")]

    def test_equal_indexes_are_equal_bytes(self, tmp_path):
        for name in ("a", "a", "b"):
            filled("exact", unit(6, 8)).save(tmp_path / name)
        assert contents(tmp_path / "a") == contents(tmp_path / "b")

    def test_an_index_is_not_saved_over_something_else(self, tmp_path):
        encode_corpus(tiny_rows(6), tiny_encoder(), tmp_path)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match="has format 'embedding store' and version 2, expected 'index' and 2;"):
            build_index(tmp_path).save(tmp_path)
        assert contents(tmp_path) == before

    @pytest.mark.parametrize("kind", ["exact", "flat"])
    def test_a_reader_during_replacement_sees_the_old_or_the_new_index(self, kind, tmp_path, monkeypatch):
        filled(kind, unit(6, 8)).save(tmp_path)
        original, replaced = StoredFolder.path, []

        def path(folder, number):
            if not replaced:  # between reading the manifest and its files
                replaced.append(filled(kind, unit(9, 8, seed=1)).save(tmp_path))
            return original(folder, number)

        monkeypatch.setattr(StoredFolder, "path", path)
        loaded = load_index(tmp_path)
        assert loaded.ids == names(9) and loaded.search(unit(9, 8, seed=1)[3:4], 1).ids == [["doc/3"]]

    def test_files_of_others_stay(self, tmp_path):
        for _ in range(2):
            filled("exact", unit(6, 8)).save(tmp_path)
            (tmp_path / "vectors-0.npy").write_text("mine")
        assert (tmp_path / "vectors-0.npy").read_text() == "mine"

    def test_a_folder_of_something_else_is_refused(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=r"is not empty and not an earlier index: it has 'config.json'"):
            filled("exact", unit(6, 8)).save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

    @pytest.mark.parametrize("kind", ["exact", "flat"])
    @pytest.mark.parametrize("function", ["replace", "fsync"])
    @pytest.mark.parametrize("call", range(3))  # ids, vectors, manifest
    def test_interrupted_save_leaves_the_old_index(self, kind, function, call, tmp_path, monkeypatch):
        filled(kind, unit(6, 8)).save(tmp_path)
        before = contents(tmp_path)
        calls = iter(range(100))
        original = getattr(os, function)

        def failing(*arguments):
            number = next(calls)
            if number == (call if function == "replace" else 2 * call):  # every second fsync is of the directory
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing)
            with pytest.raises(OSError, match="No space left on device"):
                filled(kind, unit(9, 8, seed=1)).save(tmp_path)
        assert before.items() <= contents(tmp_path).items()
        assert load_index(tmp_path).ids == names(6)
        filled(kind, unit(9, 8, seed=1)).save(tmp_path)
        assert load_index(tmp_path).ids == names(9) and len(contents(tmp_path)) == 3

    @pytest.fixture(scope="class", params=IN_MEMORY)
    @staticmethod
    def saved(request, tmp_path_factory):
        folder = tmp_path_factory.mktemp(request.param) / "index"
        filled(request.param, clustered(300, 8)).save(folder)
        return folder

    @pytest.mark.parametrize("file", ["vectors", "ids", "manifest"])
    @pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "flipped"])
    def test_damage_is_reported(self, saved, file, damage, tmp_path):
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        (path,) = tmp_path.glob(f"{file}*")
        content = path.read_bytes()
        flipped = content[:-99] + bytes([content[-99] ^ 1]) + content[-98:]
        path.write_bytes({"truncated": content[:-5], "flipped": flipped}.get(damage, b""))
        if damage == "missing":
            path.unlink()
        error = FileNotFoundError if (file, damage) == ("manifest", "missing") else ValueError
        with pytest.raises(error, match=rf"{file}.*run `conjoin index` (again|to make one)$"):
            load_index(tmp_path)

    def test_not_an_index(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no index in .*: it has no manifest\.json"):
            load_index(tmp_path)
        (tmp_path / "index.json").write_text('{"format": "conjoin-index-1"}')  # of an earlier version
        with pytest.raises(FileNotFoundError, match="run `conjoin index` to make one"):
            load_index(tmp_path)

    def test_of_another_kind(self, tmp_path):
        filled("flat", unit(6, 8)).save(tmp_path)
        with pytest.raises(ValueError, match=r"is of kind 'flat', expected \['exact'\]"):
            ExactIndex.load(tmp_path)
