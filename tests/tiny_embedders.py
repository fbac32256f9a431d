"""Tiny random embedders in the form in which their publishers give them: folders of sentence-transformers."""

import json
from pathlib import Path

from transformers import AutoProcessor, processing_utils
from transformers.utils import is_torchvision_available

from tiny_mllms import save_mllm

INSTRUCTION = "Find an image that matches the text."
DEFAULT = "Represent the user's input."
"""What Qwen3-VL-Embedding's template says; a folder with it embeds as the publisher's code does."""

# ChatML with the vision tokens of Qwen-VL; the default instruction is the template's own.
CHATML = """\
{%- set told = messages[0].content[0].text if messages[0].role == 'system' else default_system -%}
{{- '<|im_start|>system\\n' + told + '<|im_end|>\\n' -}}
{%- for message in messages if message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- for part in message.content -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def drop_video(monkeypatch):
    """Without torchvision no processor of videos can be built; leave it out, so that the others can."""
    if not is_torchvision_available():
        found = processing_utils.ProcessorMixin.get_attributes.__func__
        kept = classmethod(lambda cls: [name for name in found(cls) if name != "video_processor"])
        monkeypatch.setattr(processing_utils.ProcessorMixin, "get_attributes", kept)


def save_embedder(
    folder, name="qwen3_vl", pooling="lasttoken", prompts=None, default=None, told="Embed the input.", **options
):
    """Write a tiny embedder, with the files that Qwen3-VL-Embedding has; its own if `told` is `DEFAULT`."""
    folder = Path(folder)
    model = save_mllm(name, folder)
    (folder / "chat_template.jinja").write_text(CHATML.replace("default_system", json.dumps(told)))
    modules = ["", "1_Pooling", "2_Normalize"]
    kinds = ["models.Transformer", "sentence_transformer.modules.pooling.Pooling", "models.Normalize"]
    kinds = [f"sentence_transformers.{kind}" for kind in kinds]
    entries = [{"idx": n, "name": str(n), "path": modules[n], "type": kinds[n]} for n in range(3)]
    state = {"method": "forward", "method_output_name": "last_hidden_state"}
    write(folder / "modules.json", entries)
    write(
        folder / "1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": True}
    )
    modalities = {"text": state, "image": state, "message": state | {"format": "structured"}}
    settings = {"transformer_task": "feature-extraction", "modality_config": modalities}
    settings |= {"module_output_name": "token_embeddings"}
    settings |= {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}} | options
    write(folder / "sentence_bert_config.json", settings)
    named = {"prompts": prompts or {}, "default_prompt_name": default, "similarity_fn_name": "cosine"}
    write(folder / "config_sentence_transformers.json", {"model_type": "SentenceTransformer"} | named)
    return model


def stock_processor(folder, **size):
    """The processor of the library, with pixel limits if given."""
    processor = AutoProcessor.from_pretrained(folder)
    if size:
        processor.image_processor.size = size
    return processor


def write(file, content):
    """Write a JSON file and the folder around it."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
