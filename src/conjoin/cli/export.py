"""`conjoin export`: a saved model in a form that other programs load."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conjoin.cli.options import option
from conjoin.cli.train import usage


@dataclass(kw_only=True)
class Options:
    """Write MODEL to --out in a format.

    Format code: a folder with its own Python code, as training saves it. Format stock: an MLLM retriever, or score
    fusion over CLIP, as an ordinary checkpoint of its architecture, without code, for sentence-transformers,
    transformers and serving engines such as vLLM. Format onnx: a joint encoder, score fusion or token fusion as ONNX
    graphs, for onnxruntime and OpenVINO; onnx-int8 has weights in 8 bits.

    Args:
        model: Folder or Hub name of a model of this package; or of adapters of peft for one, which are merged into it.
        out: The folder to write; it must not exist.
        format: See above.
        readout: Of a joint encoder: fused, or sum, which adds the vectors of image and text (default: the model's).
        query_prompt: Instruction that encode_query of sentence-transformers gives (default: the model's).
        document_prompt: Likewise, of encode_document.
        revision: Branch, tag or commit of a model on the Hub (default: its main branch).

    Example:
        conjoin export runs/model --format stock --out runs/stock --query-prompt "Find an image that matches the
        caption."
    """

    model: str
    out: str = option(required=True)
    format: Literal["code", "stock", "onnx", "onnx-int8"] = "code"
    readout: Literal["fused", "sum"] | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    revision: str | None = None


def run(options: Options) -> None:
    """Load, write and print how to use it."""
    if Path(options.out).exists():
        raise FileExistsError(f"{options.out!r} exists; choose another folder")

    from conjoin.hub import export, export_onnx, export_stock, load_model
    from conjoin.hub.folder import adapter_base, model_kind
    from conjoin.hub.load import merge_adapter
    from conjoin.models.joint_encoder import JointEncoderModel

    model: Any
    processor: Any
    if model_kind(options.model, options.revision) == "adapter":
        model, processor = load_model(adapter_base(options.model, options.revision))
        merge_adapter(model, options.model, options.revision)
    else:
        model, processor = load_model(options.model, revision=options.revision)
    given = {"query": options.query_prompt, "document": options.document_prompt}
    given = {name: text for name, text in given.items() if text is not None}
    if given:
        processor.prompts = (processor.prompts or {}) | given
    if options.readout is not None:
        if not isinstance(model, JointEncoderModel):
            raise ValueError(f"--readout is for a joint encoder, not for {type(model).__name__}")
        model.config.readout = options.readout
    if options.format.startswith("onnx"):
        export_onnx(model, processor, options.out, "int8" if options.format == "onnx-int8" else "float32")
        print(f'Saved to {options.out}. Load it where onnxruntime is: conjoin.load_encoder("{options.out}")')
        return
    write = export_stock if options.format == "stock" else export
    write(model, processor, options.out)
    recipe = Path(options.model) / "recipe.json"
    if recipe.is_file():
        shutil.copy(recipe, options.out)  # for the card of `conjoin push`
    elif not Path(options.model).is_dir():
        (Path(options.out) / recipe.name).write_text(json.dumps({"model_name_or_path": options.model}))
    print(f"Saved to {options.out}. Load it anywhere:\n\n{usage(options.out)}")
