"""Nothing that transformers will remove is used: neither by this package, nor by what it writes into a checkpoint."""

import logging

import pytest
import torch
import transformers
from packaging.version import Version
from sentence_transformers import SentenceTransformer
from tiny_models import ONE_OF_EACH
from transformers import AutoModel, AutoProcessor, TrainingArguments
from transformers.utils import logging as library_logging

from conjoin.hub import export, load_model
from tiny_training import make_rows, make_trainer

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="looks for what newer releases deprecate"
)
LIBRARIES = ("conjoin", "transformers", "accelerate", "sentence_transformers", "huggingface_hub", "peft")


@pytest.fixture
def deprecations(caplog, recwarn):
    """What the libraries warn of or log as deprecated, each time, whoever calls them."""
    logging.Logger.warning_once.cache_clear()  # an earlier test may have been told already
    library_logging.enable_propagation()
    with caplog.at_level(logging.WARNING, "transformers"):  # an earlier test may have run the demo: errors only
        yield lambda: [
            *(text for text in caplog.messages if "deprecat" in text.lower()),
            *(
                f"{one.filename}:{one.lineno}: {one.message}"
                for one in recwarn
                if issubclass(one.category, DeprecationWarning | FutureWarning)
                and any(f"/{name}/" in one.filename for name in LIBRARIES)
            ),
        ]
    library_logging.disable_propagation()


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "qwen2_5_vl", "llava", "internvl"])
def test_no_deprecated_call(name, built, items, tmp_path, deprecations):
    model, processor = built(name)
    settings = {"activation_checkpointing": True, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer("contrastive", model, processor, tmp_path / "run", make_rows(8), make_rows(4), **settings)
    trainer.train()
    trainer.evaluate()
    export(trainer.encoder, processor, tmp_path / "model")
    load_model(tmp_path / "model")
    stock, options = tmp_path / "model", {"trust_remote_code": True}
    loaded = AutoModel.from_pretrained(stock, **options).eval(), AutoProcessor.from_pretrained(stock, **options)
    with torch.no_grad():
        vectors = loaded[0](**loaded[1](items)).embeddings
    encoded = SentenceTransformer(str(stock), device="cpu", **options).encode(items, convert_to_tensor=True)
    torch.testing.assert_close(encoded, vectors)
    assert deprecations() == []


@pytest.mark.parametrize("logs", [True, False])
def test_a_deprecated_call_is_found(logs, deprecations):
    if logs:
        library_logging.get_logger("transformers.models").warning_once("`a` is deprecated")
    else:
        TrainingArguments(gradient_checkpointing=True)
    assert len(deprecations()) == 1
