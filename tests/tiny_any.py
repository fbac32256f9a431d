"""Tiny random models of any image-text family that transformers has, made from its own configuration and processor."""

import inspect
import re

import torch
from PIL import Image
from transformers import AutoModel, PreTrainedConfig, processing_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available

from tiny_mllms import CHAT, tokenizer

DEPTH = 4
PATCHES = 8
"""Patches of a side of a picture, which towers may merge by 2 or 4."""
VOCABULARY = 400
LARGEST = 20_000_000
"""Parameters of a model that is built."""
SIZES = {
    r"hidden_size|embed_dim|d_model|dim|out_hidden_size|projection_dim|text_hidden_size|embedding_dim|vision_output_dim"
    r"|hidden_size_per_layer_input|output_proj_dims|lm_hidden_size|merger_hidden_size|adapter_hidden_size": 32,
    r".*intermediate_size|.*ffn_dim|mlp_dim": 48,
    r"(.*_)?num_attention_heads|num_heads|n_heads|attention_heads|.*_attention_heads": 4,
    r"num_key_value_heads": 4,
    r"(global_|qk_rope_|qk_nope_|qk_|v_)?head_dim": 8,
    r"mm_tokens_per_image": PATCHES**2 // 4,
    r"num_experts|num_local_experts|n_routed_experts": 4,
    r"num_experts_per_tok|top_k_experts": 2,
    r"num_hidden_layers|depth|n_layers|.*_layers": DEPTH,
    r"vocab_size.*|text_vocab_size": VOCABULARY,
    r"num_kv_shared_layers": 2,
}
"""Sizes of a tiny model by the names that configurations give them."""
GEMMA = {
    "num_hidden_layers": DEPTH,
    "sliding_window_pattern": 2,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
}
BUILT = {
    name: {"text_config": GEMMA, "vision_config": {"model_type": "gemma4_vision"}}
    for name in ("gemma4", "embedding_gemma2", "diffusion_gemma")
}
"""What configurations must be told when they are made, by family."""
SETTINGS = {
    "gemma3": {"image_seq_length": PATCHES**2 // 4},
    "llava_onevision": {"image_grid_pinpoints": [[112, 112], [112, 224]]},
    "t5gemma2": {"image_seq_length": PATCHES**2 // 4},
    "gemma3n": {"text_config": {"num_hidden_layers": 4, "intermediate_size": 48, "activation_sparsity_pattern": None}},
    "qwen3_vl": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "qwen3_vl_moe": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    **{
        name: {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}}
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v", "paddleocr_vl")
    },
}
"""What does not follow from the sizes, by family."""
WRITTEN = {"ovis2": {f"<IMG_{name}>" for name in ("ATOM", "START", "GRID", "COL", "ROW", "END")}}
"""Tokens that a processor writes and does not name, by family."""
TEMPLATE = """\
{%%- for message in messages -%%}
{{- '<|im_start|>' + message.role + ' ' -}}
{%%- if message.content is string -%%}{{- message.content -}}
{%%- else -%%}
{%%- for part in message.content -%%}{{- '%s' if part.type == 'image' else part.text -}}{%%- endfor -%%}
{%%- endif -%%}
{{- '<|im_end|>' -}}
{%%- endfor -%%}"""


def shrink(config):
    """Make a configuration and its parts tiny, in place; settings by layer are cut."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value)
            setattr(config, name, min(size, value))
        elif name == "rope_parameters" and value and "mrope_section" in value:
            setattr(config, name, value | {"mrope_section": [1, 1, 2]})
        elif name == "head_dim" and value is None:
            config.head_dim = 8
        elif name in ("vision_feature_layer", "vision_feature_layers") and isinstance(value, list | tuple):
            setattr(config, name, [max(-DEPTH, min(DEPTH, layer)) for layer in value])
        elif name == "per_layer_config" and value:
            setattr(config, name, {key: part for key, part in value.items() if int(key) < DEPTH})
    patch = vars(config).get("patch_size")
    if isinstance(vars(config).get("image_size"), int) and isinstance(patch, int):
        config.image_size = PATCHES * patch
    depth = vars(config).get("num_hidden_layers")
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(vars(config).get(name), list) and depth:
            setattr(config, name, (getattr(config, name) * DEPTH)[-depth:])
    return config


def update(config, settings):
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(getattr(config, name, None), PreTrainedConfig):
            update(getattr(config, name), value)
        elif isinstance(value, dict):
            setattr(config, name, (getattr(config, name, None) or {}) | value)
        else:
            setattr(config, name, value)


def token_names(config):
    """The names `image_token` ... of the tokens whose ids a configuration has."""
    found = {match[1] for name in vars(config) if (match := re.fullmatch(r"(\w+_token)_(id|index)", name))}
    parts = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return found.union(*map(token_names, parts)) if parts else found


def set_tokens(config, words):
    """Let a configuration name the ids of the tokenizer."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            set_tokens(value, words)
        elif (match := re.fullmatch(r"(\w+_token)_(id|index)", name)) and value is not None:
            setattr(config, name, words.convert_tokens_to_ids(spelled(match[1])))


def spelled(name):
    return {"pad_token": CHAT[0], "eos_token": CHAT[0], "bos_token": CHAT[1]}.get(
        name, f"<{name.removesuffix('_token')}>"
    )


def vision_of(config):
    """The configuration of the vision tower, which an encoder of its own may hold."""
    return getattr(getattr(config, "encoder", config), "vision_config", config)


def fit(eyes, config):
    """Let an image processor make pictures of the size that the vision tower of a model reads."""
    vision = vision_of(config)
    if hasattr(config, "image_grid_pinpoints"):
        eyes.image_grid_pinpoints = config.image_grid_pinpoints
    for name in ("patch_size", "temporal_patch_size", "spatial_merge_size"):
        ours = {"spatial_merge_size": "merge_size"}.get(name, name)
        if isinstance(getattr(vision, name, None), int) and isinstance(getattr(eyes, ours, None), int):
            setattr(eyes, ours, getattr(vision, name))
    if hasattr(eyes, "image_seq_length"):
        eyes.image_seq_length = PATCHES**2
    if hasattr(eyes, "max_soft_tokens"):
        eyes.max_soft_tokens = 70
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    for name in ("size", "crop_size", "max_image_size"):
        value = getattr(eyes, name, None)
        known = {} if value is None or isinstance(value, int) else dict(value)
        if isinstance(side, int) and isinstance(value, int):
            setattr(eyes, name, side)
        elif isinstance(side, int) and known and {*known} != {"shortest_edge", "longest_edge"}:
            setattr(eyes, name, type(value)(**dict.fromkeys(known, side)))
        elif name == "size" and {*known} == {"shortest_edge", "longest_edge"} and known["longest_edge"] > 9999:
            eyes.size = {"shortest_edge": 1024, "longest_edge": 128 * 128}
    return eyes


def make_processor(config, tokens, written):
    """The processor of a family around a tiny tokenizer, which gets the tokens that it asks for and that it writes."""
    words = tokenizer([*CHAT, *dict.fromkeys(spelled(name) for name in tokens if spelled(name) not in CHAT)])
    words.add_tokens(sorted(written), special_tokens=True)
    words._set_model_specific_special_tokens({name: spelled(name) for name in tokens})
    kind = PROCESSOR_MAPPING[type(config)]
    alike = [each for each, other in PROCESSOR_MAPPING.items() if other is kind and each in IMAGE_PROCESSOR_MAPPING]
    eyes = IMAGE_PROCESSOR_MAPPING[type(config) if type(config) in IMAGE_PROCESSOR_MAPPING else alike[0]]
    eyes = eyes.get("pil") or eyes["torchvision"]
    arguments = {}
    for name in inspect.signature(kind.__init__).parameters:
        if name.endswith("tokenizer"):
            arguments[name] = words
        elif name == "image_processor":
            arguments[name] = fit(eyes(), config)
        elif name == "video_processor":
            kinds = VIDEO_PROCESSOR_MAPPING[type(config)] if is_torchvision_available() else {}
            arguments[name] = kinds["torchvision"]() if kinds else None
        elif name in ("feature_extractor", "audio_processor"):
            arguments[name] = FEATURE_EXTRACTOR_MAPPING[type(config)]()
        else:
            for part in (config, vision_of(config)):
                value = getattr(part, {"img_size": "image_size"}.get(name, name), None)
                if value is not None and name != "chat_template":
                    arguments.setdefault(name, value)
    if "image_seq_length" in inspect.signature(kind.__init__).parameters and "image_seq_length" not in arguments:
        arguments["image_seq_length"] = PATCHES**2
    if "num_image_tokens" in inspect.signature(kind.__init__).parameters:
        arguments["num_image_tokens"] = PATCHES**2
    if "image_seq_len" in inspect.signature(kind.__init__).parameters and hasattr(config, "vision_config"):
        merged = getattr(config, "scale_factor", getattr(config, "pixel_shuffle_factor", 4))
        latents = getattr(getattr(config, "perceiver_config", None), "resampler_n_latents", None)
        arguments["image_seq_len"] = latents or (PATCHES // merged) ** 2
    if "num_additional_image_tokens" in inspect.signature(kind.__init__).parameters:
        arguments["num_additional_image_tokens"] = int("clip" in config.vision_config.model_type)
        arguments.setdefault("vision_feature_select_strategy", "default")
    return kind(**arguments)


def make_any(name):
    """Return the model and the processor of a family, in evaluation mode.

    Raises:
        Exception: What the classes of the family raise.
    """
    torch.manual_seed(0)
    config = shrink(CONFIG_MAPPING[name](**BUILT.get(name, {})))
    update(config, SETTINGS.get(name, {}))
    tokens = {"image_token", "pad_token", "eos_token", "bos_token"} | token_names(config)
    written = set(WRITTEN.get(name, ()))
    while True:
        try:
            processor = make_processor(config, tokens, written)
            named = [value for key, value in vars(processor).items() if "token" in key]
            texts = {text for text in named if isinstance(text, str) and text}
            if texts <= written:
                break
            written |= texts
        except (AttributeError, ValueError) as error:
            wanted = re.search(r"(?:has no|missing required) attribute '?(\w+_token)(_id)?'?", str(error))
            if wanted is None or wanted[1] in tokens:
                raise
            tokens.add(wanted[1])
    words = processor.tokenizer
    set_tokens(config, words)
    config = type(config).from_dict(config.to_dict())
    with torch.device("meta"):
        count = sum(each.numel() for each in AutoModel.from_config(config).parameters())
    if count > LARGEST:
        raise MemoryError(f"a tiny {name} has {count / 1e6:.0f} M parameters")
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():  # library initialisations are so small that all embeddings would be alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    picture = Image.effect_noise((64, 64), 90).convert("RGB")
    problem = None
    marks = [getattr(processor, each, None) for each in ("image_token", "boi_token")]
    marks += [spelled(each) for each in ("image_token", "boi_token")]
    for mark in dict.fromkeys(each for each in marks if isinstance(each, str)):
        processor.chat_template = TEMPLATE % mark
        content = [{"type": "image", "image": picture}, {"type": "text", "text": "a"}]
        try:
            batch = processor.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
            )
            if hasattr(config, "image_token_id") and config.image_token_id not in batch["input_ids"]:
                model.config.image_token_id = int(batch["input_ids"].flatten().bincount().argmax())  # the repeated one
            with torch.no_grad():
                model(**batch)
            return model, processor
        except Exception as error:
            problem = problem or error
    raise problem


def save_any(name, folder):
    """Write a tiny model of a family as its publisher would: weights, processor, chat template."""
    model, processor = make_any(name)
    model.save_pretrained(folder, max_shard_size="20KB")
    processor.save_pretrained(folder)


def drop_videos(monkeypatch):
    """Without torchvision no processor of videos can be built; leave it out, so that the others can."""
    if not is_torchvision_available():
        mixin = processing_utils.ProcessorMixin
        found, build, read = mixin.get_attributes.__func__, mixin.__init__, mixin.from_args_and_dict.__func__
        kept = classmethod(lambda cls: [name for name in found(cls) if name != "video_processor"])
        monkeypatch.setattr(mixin, "get_attributes", kept)

        def build_kept(self, *given, video_processor=None, **more):
            names = found(type(self))
            if len(given) == len(names):  # wherever the processor of videos stands
                given = [part for name, part in zip(names, given, strict=True) if name != "video_processor"]
            build(self, *given, **more)

        monkeypatch.setattr(mixin, "__init__", build_kept)

        def by_name(cls, args, settings, **more):
            more |= dict(zip(cls.get_attributes(), args, strict=True))
            takes_videos = "video_processor" in inspect.signature(cls.__init__).parameters
            return read(cls, (), settings, **more | ({"video_processor": None} if takes_videos else {}))

        monkeypatch.setattr(mixin, "from_args_and_dict", classmethod(by_name))
