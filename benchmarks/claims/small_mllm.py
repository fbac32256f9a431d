"""A small real MLLM made of sample weights: SmolLM2-135M sees through the sample ViT-S and a projector, as in LLaVA.

The recipe is kept, not the weights. A picture becomes five tokens: the CLS state of the frozen tower at 98 px and its
patches pooled to 2 x 2, so what the tower makes of a picture is computed once for all runs. The projector alone is
trained, by the language modelling loss, to let the language model name the picture where the retriever asks for it.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import BatchFeature, LlavaConfig, LlavaForConditionalGeneration, get_cosine_schedule_with_warmup
from transformers.modeling_outputs import BaseModelOutputWithPooling

from conjoin.data import (
    SAMPLE_VISION_LAYER,
    load_emoji,
    load_sample_language_model,
    load_sample_vision_tower,
    sample_image_processor,
)
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor

SIZE, POOLED = 98, 2
PICTURE_TOKENS = 1 + POOLED**2
IMAGE_TOKEN = "<repo_name>"
ASK = "In one word: "
TEMPLATE = {"start": "<|im_start|>", "image_start": "", "image_end": "\n", "ask": ASK, "end": ""}
"""PUMA's question in fewer words and without those of a chat around it, which would be most of a prompt."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class PictureFeatures:
    """Stands where an image processor does: pictures become `(N, 5, 384)` features, each picture once.

    Args:
        path: Where they are kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Tensor] = torch.load(path) if path.is_file() else {}
        self.tower: nn.Module | None = None
        self.processor = sample_image_processor(SIZE)

    def __call__(self, images: Sequence[Image.Image], return_tensors: str = "pt") -> BatchFeature:
        """Look pictures up, or compute them."""
        names = [hashlib.blake2b(image.tobytes() + repr(image.size).encode()).hexdigest() for image in images]
        new = {name: image for name, image in zip(names, images, strict=True) if name not in self.known}
        if new:
            self.known |= dict(zip(new, self._compute(list(new.values())), strict=True))
        return BatchFeature({"pixel_values": torch.stack([self.known[name] for name in names])})

    def prepare(self, folder: Path) -> None:
        """Compute the pictures of a folder that are not known yet, and keep them."""
        paths = sorted(folder.rglob("*.png"))
        known = len(self.known)
        for start in range(0, len(paths), 64):
            self([Image.open(path).convert("RGB") for path in paths[start : start + 64]])
        if len(self.known) > known:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.known, self.path)

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
    """Stands where the vision tower does, for pictures that arrive as what it would make of them."""

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:  # noqa: ANN401
        """Hand them on."""
        return BaseModelOutputWithPooling(hidden_states=(pixel_values, pixel_values))


def load_retriever(folder: Path, keep_layers: int, seed: int, **config: Any) -> MllmRetrieverModel:  # noqa: ANN401
    """The first layers of the MLLM, frozen, for pictures that arrive as features."""
    torch.manual_seed(seed)
    model = MllmRetrieverModel.from_mllm(folder, keep_layers, dtype=torch.bfloat16, **config)
    model.backbone.vision_tower = AsTheyAre()
    if DEVICE.type == "cpu":  # for short prompts in bfloat16 the plain kernel's backward is much faster there
        model.text_model.set_attn_implementation("eager")
    return model.requires_grad_(False).to(DEVICE)


def load_processor(folder: Path, pictures: PictureFeatures | None = None) -> MllmRetrieverProcessor:
    """Its processor, with pictures as features if they are given."""
    processor = MllmRetrieverProcessor.from_mllm(folder, template=TEMPLATE)
    if pictures is not None:
        processor.image_processor = pictures
    return processor


def make_mllm(
    folder: Path, pictures: PictureFeatures, steps: int, batch_size: int = 32, rate: float = 2e-3
) -> dict[str, float]:
    """Compose the MLLM and train its projector, or find it done; what the picture brings to captions it has not seen.

    Returns:
        `caption_loss` of validation captions in nats per token, given their pictures, and `shuffled_caption_loss`
        given those of others.
    """
    recipe = {"steps": steps, "batch_size": batch_size, "rate": rate, "size": SIZE, "tokens": PICTURE_TOKENS}
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
    mllm = LlavaForConditionalGeneration(config).requires_grad_(False)
    mllm.model.vision_tower = AsTheyAre()
    mllm.model.language_model = language_model.model
    mllm.lm_head = language_model.lm_head
    mllm.to(DEVICE, torch.bfloat16)
    mllm.model.multi_modal_projector.float().requires_grad_(True)
    captions = Captions(tokenizer, pictures, mllm)
    captions.train(steps, batch_size, rate)
    found = captions.measure()
    mllm.model.vision_tower = vision_tower
    mllm.to("cpu", torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sample_image_processor(SIZE).save_pretrained(folder)
    done.write_text(json.dumps({"recipe": recipe, "found": found}) + "\n")
    return found


class Captions:
    """Names of emoji as the answer to the retriever's question about their picture."""

    def __init__(self, tokenizer: Any, pictures: PictureFeatures, mllm: LlavaForConditionalGeneration) -> None:  # noqa: ANN401
        self.tokenizer, self.pictures, self.mllm = tokenizer, pictures, mllm
        question = TEMPLATE["start"] + IMAGE_TOKEN * PICTURE_TOKENS + "\n" + ASK.rstrip()
        self.question = tokenizer(question)["input_ids"]

    def train(self, steps: int, batch_size: int, rate: float) -> None:
        """Train the projector."""
        rows = load_emoji("train")
        names = list(zip(rows["text"], rows["alternative_text"], strict=True))
        weights = list(self.mllm.model.multi_modal_projector.parameters())
        optimizer = torch.optim.AdamW(weights, rate, weight_decay=0.01)
        schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
        generator = torch.Generator().manual_seed(0)
        for step in range(steps):
            chosen = torch.randint(len(rows), (batch_size,), generator=generator).tolist()
            texts = [names[place][(step + place) % 2] or names[place][0] for place in chosen]
            loss = self.loss([rows[place]["image"] for place in chosen], texts)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 50 == 0:
                print(f"projector: step {step} of {steps}, {loss.item():.2f} nats per token", flush=True)

    @torch.inference_mode()
    def measure(self) -> dict[str, float]:
        """Loss of unseen captions with their own pictures and with others."""
        rows = load_emoji("validation")
        images, texts = list(rows["image"]), list(rows["text"])
        others = images[len(images) // 2 :] + images[: len(images) // 2]
        parts = range(0, len(texts), 32)
        return {
            name: sum(self.loss(shown[at : at + 32], texts[at : at + 32]).item() for at in parts) / len(parts)
            for name, shown in (("caption_loss", images), ("shuffled_caption_loss", others))
        }

    def loss(self, images: list[Image.Image], texts: list[str]) -> Tensor:
        """Cross-entropy of the texts, in nats per token."""
        end = self.tokenizer.eos_token
        answers = [self.tokenizer(f" {text}{end}")["input_ids"] for text in texts]
        length = max(map(len, answers))
        ids = torch.tensor([self.question + answer + [0] * (length - len(answer)) for answer in answers])
        features = self.pictures(images)["pixel_values"].to(DEVICE)
        asked = len(self.question)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            states = self.mllm.model(input_ids=ids.to(DEVICE), pixel_values=features, use_cache=False)[0]
            answered = torch.tensor([[place < len(answer) for place in range(length)] for answer in answers])
            scores = self.mllm.lm_head(states[:, asked - 1 : -1][answered])
        return F.cross_entropy(scores.float(), ids[:, asked:][answered].to(DEVICE))
