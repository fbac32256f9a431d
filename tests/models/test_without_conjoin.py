import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import ONE_OF_EACH

NAMES = [*ONE_OF_EACH, "joint clip"]

LOAD_AND_EMBED = """
import json
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModel, AutoProcessor

folder, names = {arguments!r}
items = [item if isinstance(item, str) else {{**item, "image": Image.open(item["image"])}}
         for item in json.load(open(folder + "/items.json"))]
vectors = {{}}
for name in names:
    model = AutoModel.from_pretrained(f"{{folder}}/{{name}}", trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(f"{{folder}}/{{name}}", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    with torch.no_grad():
        vectors[name] = model(**processor(items)).embeddings
    model.save_pretrained(f"{{folder}}/{{name}} again")
    processor.save_pretrained(f"{{folder}}/{{name}} again")
    again = AutoModel.from_pretrained(f"{{folder}}/{{name}} again", trust_remote_code=True).eval()
    with torch.no_grad():
        vectors[name + " again"] = again(**processor(items)).embeddings
save_file(vectors, folder + "/vectors.safetensors")
try:
    import conjoin
except ImportError as error:
    print("blocked:", error)
"""


@torch.no_grad()
@pytest.mark.slow
def test_checkpoints_carry_their_code(built, pictures, tmp_path, run_without_conjoin, monkeypatch):
    """Saved, loaded where the package is not installed, saved and loaded again: the same vectors to the bit."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    items = ["a red box", {"image": str(tmp_path / "0.png")}, {"text": "x", "image": str(tmp_path / "1.png")}]
    for number in (0, 1):
        pictures[number].save(tmp_path / f"{number}.png")
    (tmp_path / "items.json").write_text(json.dumps(items))
    expected = {}
    for name in NAMES:
        model, processor = built(name)
        model.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
        expected[name] = expected[f"{name} again"] = model(**processor(items)).embeddings
    printed = run_without_conjoin(LOAD_AND_EMBED.format(arguments=(str(tmp_path), NAMES)))
    assert "blocked: No module named 'conjoin'" in printed
    vectors = load_file(tmp_path / "vectors.safetensors")
    assert {name: (vectors[name] - value).abs().max().item() for name, value in expected.items()} == dict.fromkeys(
        expected, 0.0
    )
