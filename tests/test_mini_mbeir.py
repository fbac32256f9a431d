"""The miniature: the published layout, all cells, the same bytes every time, resumable."""

import json
from pathlib import Path

import mini_mbeir as mini_module
import pytest
from PIL import Image

from conjoin.data import MBEIR_CELLS, MbeirCandidates, MbeirTraining, load_instructions, mbeir_queries
from conjoin.data.mbeir import pool_file


@pytest.fixture(scope="module")
def make(load_first_emoji):
    """`make_mini_mbeir` over the first concepts of each split."""
    patch = pytest.MonkeyPatch()
    patch.setattr(mini_module, "load_emoji", load_first_emoji)

    def run(out, **limits):
        return mini_module.make_mini_mbeir(
            out, **({"train_queries": 12, "val_queries": 5, "test_queries": 8} | limits)
        )

    yield run
    patch.undo()


@pytest.fixture(scope="module")
def mini(make, tmp_path_factory):
    return make(tmp_path_factory.mktemp("mini") / "mbeir")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_the_layout_is_the_published_one(mini):
    names = {str(path) for path in contents(mini)}
    for cell in MBEIR_CELLS:
        for split in ("val", "test"):
            assert f"query/{split}/mbeir_{cell.name}_{split}.jsonl" in names
            assert f"qrels/{split}/mbeir_{cell.name}_{split}_qrels.txt" in names
            own = f"_{split}" if cell.dataset == "mscoco" else ""
            assert f"cand_pool/local/mbeir_{cell.name}{own}_cand_pool.jsonl" in names
        assert f"query/train/mbeir_{cell.dataset}_train.jsonl" in names
    for split in ("train", "val", "test"):
        assert f"cand_pool/global/mbeir_union_{split}_cand_pool.jsonl" in names
    assert len(load_instructions(mini)) == 16
    first = json.loads((mini / "query/test/mbeir_webqa_task2_test.jsonl").read_text().splitlines()[0])
    query = ["qid", "query_txt", "query_img_path", "query_modality", "query_src_content"]
    assert list(first) == [*query, "pos_cand_list", "neg_cand_list"]
    judged = (mini / "qrels/test/mbeir_webqa_task2_test_qrels.txt").read_text().split()
    assert judged[:4] == [first["qid"], "0", first["pos_cand_list"][0], "1"]
    line = (mini / "query/test/mbeir_infoseek_task8_test.jsonl").read_text().splitlines()[0]
    assert {did[:1] for did in json.loads(line)["pos_cand_list"]} >= {"5", "6"}, "equal candidates of other datasets"


@pytest.mark.parametrize("cell", MBEIR_CELLS, ids=lambda cell: cell.name)
def test_every_cell_loads_and_every_image_opens(mini, cell):
    for split, limit in (("val", 5), ("test", 8)):
        queries = mbeir_queries(mini, cell, split)
        assert 0 < len(queries) <= limit
        pool = MbeirCandidates(mini, pool_file(mini, cell, split))
        assert {row["modality"] for row in pool} == {cell.target_modality}
        union = MbeirCandidates(mini, pool_file(mini, None, split))
        assert all(did in union for did in pool.ids)
        for row in [*(query["query"] for query in queries), *pool]:
            if row.get("image") is not None:
                with Image.open(row["image"]) as image:
                    assert image.size == (144, 144)


def test_training_rows_and_their_negatives(mini):
    rows = MbeirTraining(mini, hard_negatives=2)
    assert set(rows.sources) == {cell.dataset for cell in MBEIR_CELLS}
    for row in map(rows.__getitem__, range(0, len(rows), 7)):
        assert row["positive_id"] not in row["negative_ids"]
        assert row["positive"] not in row["negatives"]
    assert any(row["negatives"] for row in map(rows.__getitem__, range(len(rows))))


def test_it_is_the_same_every_time_and_goes_on_after_an_interruption(make, mini, tmp_path, monkeypatch):
    out = tmp_path / "again"
    draw = mini_module._draw_pictures

    def interrupted(folder, pictures, cache_dir):
        draw(folder, set(sorted(pictures)[:10]), cache_dir)
        raise KeyboardInterrupt

    monkeypatch.setattr(mini_module, "_draw_pictures", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(out)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again.partial").rglob("*.png")}
    assert len(kept) == 10 and not out.exists()
    monkeypatch.setattr(mini_module, "_draw_pictures", draw)
    assert contents(make(out)) == contents(mini)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in out.rglob("*.png")}.items()
    monkeypatch.setattr(mini_module, "_draw_pictures", interrupted)
    assert make(out) == out  # nothing to do


def test_it_does_not_overwrite(make, mini, tmp_path):
    with pytest.raises(FileExistsError, match="exists and is not this miniature of M-BEIR"):
        make(mini, test_queries=7)
    with pytest.raises(ValueError, match="val_queries=0 must be at least 1"):
        make(tmp_path / "new", val_queries=0)
