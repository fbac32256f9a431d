from conjoin.hub.build import from_backbones as from_backbones, from_clip as from_clip, from_mllm as from_mllm
from conjoin.hub.embedder import load_embedder as load_embedder
from conjoin.hub.folder import (
    check_model as check_model,
    loading as loading,
    model_kind as model_kind,
    model_type as model_type,
)
from conjoin.hub.load import (
    load_any as load_any,
    load_model as load_model,
    load_processor as load_processor,
    load_trainable as load_trainable,
)
from conjoin.hub.onnx_export import export_onnx as export_onnx
from conjoin.hub.pruned_checkpoint import cut_checkpoint as cut_checkpoint
from conjoin.hub.save import export as export
from conjoin.hub.stock import export_stock as export_stock, save_model as save_model
