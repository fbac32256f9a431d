"""Ray Data encodes a store on two local workers, one of which is killed."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from conjoin.retrieval import encode_corpus, encode_on_ray
from tiny_encoder import tiny_encoder, tiny_rows

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
SHARD = 5


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("[!.]*"))}


def dying_encoder(marker, device):
    """An encoder that kills its process at its third batch, once, if that is a worker of Ray."""
    encoder = tiny_encoder()
    encode = encoder.model.forward

    def forward(text, pixels):
        if len(encoder.model.batches) == 2 and device is None and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(text, pixels)

    encoder.model.forward = forward
    return encoder


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


def test_a_killed_worker_and_a_resumed_store(cluster, tmp_path):
    encode_corpus(tiny_rows(), tiny_encoder(), tmp_path / "one", shard_size=SHARD)
    reference = contents(tmp_path / "one")
    encode = partial(encode_on_ray, make_encoder=partial(dying_encoder, tmp_path / "killed"), shard_size=SHARD)

    def stopping():
        yield from tiny_rows()[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_corpus(stopping(), tiny_encoder(), tmp_path / "ray", shard_size=SHARD)
    before = (tmp_path / "ray" / "shard-00000.safetensors").stat().st_mtime_ns
    store = encode(tiny_rows(), directory=tmp_path / "ray", workers=2)
    assert (tmp_path / "killed").exists() and contents(tmp_path / "ray") == reference
    assert store.ids == [row["id"] for row in tiny_rows()]
    assert (tmp_path / "ray" / "shard-00000.safetensors").stat().st_mtime_ns == before

    rows = tiny_rows()
    rows[7] |= {"text": "another"}
    with pytest.raises(ValueError, match="row 7 with the id 'row/7' has another text"):
        encode(rows, directory=tmp_path / "ray", workers=1)


def test_bad_settings(tmp_path):
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        encode_on_ray(tiny_rows(), tiny_encoder, tmp_path, workers=0)
