"""The model `sample`: two small pretrained towers from pip as one folder of sentence-transformers."""

import tempfile
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME

import conjoin
from conjoin.constants import SAMPLE_MODEL
from conjoin.data import SAMPLE_VISION_LAYER, load_sample_text_tower, load_sample_vision_tower, sample_image_processor
from conjoin.storage.files import publish_folder, temporary_path, write_checksums


def sample_model() -> Path:
    """Return the folder of the model `sample`; the first call makes it, below `HF_HOME`.

    Its vectors are the unit vectors of both towers side by side; a part that an item lacks is zero. Nothing is trained
    on top: words are compared with words, and pictures with pictures.

    Raises:
        ImportError: The `sample` extra is not installed.
    """
    folder = Path(HF_HOME, "conjoin", conjoin.__version__, SAMPLE_MODEL)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_path(folder) as aside:
            _save(aside)
            try:
                publish_folder(aside, folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
    return folder


def _save(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling

    vision, (text, tokenizer) = load_sample_vision_tower(), load_sample_text_tower()
    states = {
        "method": "forward",
        "method_output_name": ["hidden_states", SAMPLE_VISION_LAYER],
    }  # before the last norm
    read = {"image": {"modality_config": {"image": states}, "module_output_name": "token_embeddings"}, "text": {}}
    parts = {"image": (vision, sample_image_processor()), "text": (text, tokenizer)}
    routes, width = {}, text.config.hidden_size
    with tempfile.TemporaryDirectory() as work:
        for place, (name, saved) in enumerate(parts.items()):
            for part in saved:
                part.save_pretrained(Path(work, name))
            beside = Dense(width, 2 * width, bias=False, activation_function=torch.nn.Identity())
            beside.linear.weight.data = torch.eye(2 * width)[:, place * width : (place + 1) * width].contiguous()
            pooling = Pooling(width, {"image": "cls", "text": "mean"}[name])
            routes[name] = [Transformer(str(Path(work, name)), **read[name]), pooling, Normalize(), beside]
        model = SentenceTransformer(modules=[Router(routes), Normalize()], device="cpu", similarity_fn_name="cosine")
        model.save_pretrained(str(folder), create_model_card=False)
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    write_checksums(folder, files)
