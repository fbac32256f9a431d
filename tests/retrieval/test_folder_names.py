"""A collection lies in the folder that is named, whatever letters its path has."""

import os
import subprocess
import sys
from pathlib import Path

import lancedb
import pytest

from conjoin import encode_collection, open_collection, search_items
from tiny_encoder import tiny_encoder

ROWS = [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}, {"id": "c", "text": "three"}]


@pytest.mark.parametrize("name", ["Möbel", "家具", "100 %", "a%20b", "a#b", "a?b", "a b"])
def test_all_files_are_in_the_folder(name, tmp_path):
    folder, encoder = tmp_path / name / "shop", tiny_encoder()
    encode_collection(ROWS[:2], encoder, folder)
    encode_collection(ROWS[1:], encoder, folder, sync=True)
    open_collection(folder).index(None)
    open_collection(folder).remove(["b"])
    assert search_items(open_collection(folder), encoder, ["three"]).ids == [["c"]]
    assert os.listdir(tmp_path) == [name] and os.listdir(tmp_path / name) == ["shop"]
    table = lancedb.connect(str(folder / "data")).open_table("train")  # stock LanceDB
    table.checkout("published")
    assert table.to_arrow()["id"].to_pylist() == ["c"]


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from conjoin import encode_collection, open_collection
from tiny_encoder import tiny_encoder
work, rows = Path(sys.argv[1]), [{"id": "a", "text": "one"}]
encode_collection(rows, tiny_encoder(), work / "first")  # imports what the other user cannot read
home = work / "jürgen"
home.mkdir()
os.chown(home, 12345, 12345)
os.chmod(work, 0o755)
os.setgid(12345)
os.setuid(12345)
assert not os.access(work, os.W_OK)
encode_collection(rows, tiny_encoder(), home / "shop")
assert encode_collection([*rows, {"id": "b", "text": "two"}], tiny_encoder(), home / "shop").ids == ["a", "b"]
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root becomes another user")
def test_the_parent_may_not_be_written():
    work = Path(subprocess.check_output(["mktemp", "-d", "/tmp/conjoin-XXXXXX"], text=True).strip())
    try:
        ran = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER, str(work)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert sorted(os.listdir(work)) == ["first", "jürgen"]
    finally:
        subprocess.run(["rm", "-r", str(work)], check=True)
