"""Frozen teachers of SOLAR's stage 1: a vision model on the student's patch grid, a text model on its tokens.

A teacher is not a submodule of the student, so training neither updates nor saves it. `TeacherCollator` prepares its
inputs in the data-loader workers; its forward runs on the device of the batch.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from conjoin.data import PairCollator
from conjoin.hub import loading
from conjoin.models.joint_encoder import JointEncoderOutput
from conjoin.processing import ImageTextProcessor, load_image
from conjoin.processing.item_inputs import item_names
from conjoin.processing.processing_image_text import text_limit, without_special_words


class TeacherTargets(NamedTuple):
    """The teacher's states for a batch, aligned to the student's tokens; their widths may differ from the student's.

    Args:
        image_tokens: `(N, P, D)` states of the patches.
        image_global: `(N, D)` states of the images.
        text_tokens: `(N, T, D')` states of the text tokens.
        text_global: `(N, D')` states of the texts.
        text_mask: `(N, T)` bool, the student tokens that have a teacher state.
    """

    image_tokens: Tensor
    image_global: Tensor
    text_tokens: Tensor
    text_global: Tensor
    text_mask: Tensor


def tower_targets(output: JointEncoderOutput) -> TeacherTargets:
    """Return the tokens of the student's frozen towers, before the adapters, as targets.

    They suit towers that are the paper's teachers (DINOv2, BGE-m3), and cost nothing: the forward computed them.
    """
    image, text = (cast(Tensor, features).detach() for features in (output.image_features, output.text_features))
    return TeacherTargets(image[:, 1:], image[:, 0], text[:, 1:], text[:, 0], cast(Tensor, output.text_token_mask))


class Teachers:
    """A frozen vision model and a frozen text model (DINOv2 and BGE-m3 in the paper).

    Args:
        vision: Any transformers vision model with patches.
        image_processor: Its image processor, used for colour statistics and resampling; crop and resolution follow
            the student.
        text: Any transformers text model whose first token is CLS.
        tokenizer: Its fast tokenizer.
        text_global: Computes the states of whole texts in place of `text`, from the same tokens (in the paper, token
            states are of BGE-m3-retromae and global states of BGE-m3).
        max_text_length: Maximum text length in tokens; None for the tokenizer's limit.

    Raises:
        ValueError: The vocabularies of both text models differ in size.
    """

    def __init__(
        self,
        vision: PreTrainedModel,
        image_processor: Any,
        text: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text_global: PreTrainedModel | None = None,
        max_text_length: int | None = None,
    ) -> None:
        texts = [text] if text_global is None else [text, text_global]
        sizes = [each.config.get_text_config().vocab_size for each in texts]
        if len(set(sizes)) > 1:
            raise ValueError(f"text and text_global read the same tokens, but their vocabularies have sizes {sizes}")
        self.vision, self.texts = vision.requires_grad_(False).eval(), [e.requires_grad_(False).eval() for e in texts]
        self.image_processor, self.patch_size = image_processor, vision.config.patch_size
        self.tokenizer, self.max_text_length = tokenizer, max_text_length

    @classmethod
    def from_pretrained(
        cls, vision: str, text: str, text_global: str | None = None, max_text_length: int | None = None
    ) -> Self:
        """Load from names or folders; of a two-tower checkpoint (CLIP, SigLIP) its vision tower is the teacher."""

        def load(part: Any, name: str, **options: Any) -> Any:
            with loading(name):
                return part.from_pretrained(name, trust_remote_code=False, **options)

        model, words = (load(AutoModel, name, dtype=torch.float32) for name in (vision, text))
        whole = None if text_global is None else load(AutoModel, text_global, dtype=torch.float32)
        tower = model.vision_model if "vision_config" in model.config.sub_configs else model
        processors = load(AutoImageProcessor, vision), load(AutoTokenizer, text)
        return cls(tower, processors[0], words, processors[1], whole, max_text_length)

    def __call__(self, teacher_inputs: Mapping[str, Any], output: JointEncoderOutput) -> TeacherTargets:
        """Return the targets for a batch of `TeacherCollator`, aligned to the student's tokens.

        Raises:
            ValueError: The batch has no teacher inputs.
        """
        image, image_global, words, text_global = (state.float() for state in self.states(teacher_inputs))
        tokens, known = align_tokens(words, teacher_inputs["text_spans"], teacher_inputs["student_spans"])
        return TeacherTargets(image, image_global, tokens, text_global, known & cast(Tensor, output.text_token_mask))

    @torch.no_grad()
    def states(self, teacher_inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the states of the patches, the images, the teacher's own text tokens and the texts of a batch."""
        if "pixel_values" not in teacher_inputs:
            raise ValueError("the batch has no teacher inputs: collate images by TeacherCollator (feature_copies=0)")
        pixels, ids, mask = (teacher_inputs[name] for name in ("pixel_values", "input_ids", "attention_mask"))
        for model in (self.vision, *self.texts):
            nn.Module.to(model, pixels.device)
        extra = {"interpolate_pos_encoding": True}
        extra = extra if extra.keys() <= inspect.signature(self.vision.forward).parameters.keys() else {}
        with torch.autocast(pixels.device.type, enabled=False):
            output = self.vision(pixel_values=pixels.to(self.vision.dtype), **extra)
            texts = [text(input_ids=ids, attention_mask=mask).last_hidden_state for text in self.texts]
        images = output.last_hidden_state
        height, width = (side // self.patch_size for side in pixels.shape[-2:])
        num_prefix = images.shape[1] - height * width  # CLS and register tokens
        pooled = images[:, 0] if num_prefix else output.pooler_output
        words = texts[0].masked_fill(mask[..., None] == 0, 0.0)
        return images[:, num_prefix:], pooled, words, texts[-1][:, 0]


class TeacherCollator:
    """Collates rows of pairs into the student's batch, with the teachers' inputs as `teacher` in the part `pairs`.

    Dimension 0 of every tensor is the row. The collator holds no model, so data-loader workers can use it.

    Args:
        processor: The student's processor.
        patch_size: The student's patch size in pixels.
        teachers: The teachers to prepare inputs for.

    Raises:
        ValueError: On a call, a row lacks its image or text.
    """

    def __init__(self, processor: ImageTextProcessor, patch_size: int, teachers: Teachers) -> None:
        self.collator, self.processor, self.patch_size = PairCollator(processor), processor, patch_size
        self.teacher_patch_size = teachers.patch_size
        self.image_processor = matching_image_processor(
            processor.image_processor, teachers.image_processor, teachers.patch_size, patch_size
        )
        self.tokenizer, self.max_length = teachers.tokenizer, teachers.max_text_length
        size = processor([Image.new("RGB", (32, 32))])["pixel_values"].shape[-2:]
        self.grid = [side // patch_size for side in size]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = item_names(len(rows), [str(row.get("id", index)) for index, row in enumerate(rows)])
        for row, name in zip(rows, names, strict=True):
            if row.get("image") is None or isinstance(row["image"], list | tuple) or not row.get("text"):
                raise ValueError(f"{name}: teachers need one image and a text in every row")
        batch, processor = self.collator(rows), self.processor
        texts = [row["text"].strip() for row in rows]
        length, padding = processor.max_text_length, processor.text_padding
        _, student_spans = tokenize_with_spans(processor.tokenizer, texts, length, padding)
        encoded, text_spans = tokenize_with_spans(self.tokenizer, texts, self.max_length, padding_side="right")
        images = [load_image(row["image"], name) for row, name in zip(rows, names, strict=True)]
        pixels = [self.image_processor(images=[each], return_tensors="pt")["pixel_values"] for each in images]
        height, width = (side * self.teacher_patch_size for side in self.grid)
        batch["pairs"]["teacher"] = {
            "student_spans": student_spans,
            "text_spans": text_spans,
            "pixel_values": torch.cat(pixels)[..., :height, :width].contiguous(),
            **{name: encoded[name] for name in ("input_ids", "attention_mask")},
        }
        return batch


def matching_image_processor(student: Any, teacher: Any, teacher_patch_size: int, patch_size: int) -> Any:
    """Return the student's image processor with the teacher's scale and colours, so both see the same patches.

    Args:
        student: The student's image processor.
        teacher: The teacher's image processor; its mean, deviation, rescaling and resampling are used.
        teacher_patch_size: Side of the teacher's patches in pixels.
        patch_size: Side of the student's patches in pixels.
    """
    settings = student.to_dict()
    for name in ("size", "crop_size"):
        if settings.get(name):
            settings[name] = {
                side: -(-pixels * teacher_patch_size // patch_size) for side, pixels in settings[name].items()
            }
    colours = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
    theirs = teacher.to_dict()
    return type(student).from_dict(settings | {name: theirs[name] for name in colours if name in theirs})


def tokenize_with_spans(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None = None,
    padding: str = "longest",
    padding_side: str | None = None,
) -> tuple[BatchEncoding, Tensor]:
    """Tokenise texts as `ImageTextProcessor` does, and return the character span of each token.

    Args:
        tokenizer: Any fast tokenizer.
        texts: N texts.
        max_length: Maximum text length in tokens; the tokenizer's limit always applies.
        padding: Argument of the tokenizer.
        padding_side: Side of the padding; None for the tokenizer's default.

    Returns:
        The encoding, and spans `(N, T, 2)`: start and exclusive end of each token. Positions do not count white space,
        because tokenizers assign it differently. Special tokens and padding have empty spans.
    """
    limit = text_limit(tokenizer, max_length)
    encoded = tokenizer(
        texts,
        padding=padding,
        padding_side=padding_side,
        truncation=limit is not None,
        max_length=limit,
        split_special_tokens=True,  # as in the processor, special tokens in a text are ordinary words
        return_attention_mask=True,
        return_special_tokens_mask=True,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    encoded["input_ids"] = without_special_words(encoded["input_ids"], encoded["special_tokens_mask"], tokenizer)
    longest = max(map(len, texts), default=0)
    inked = torch.tensor([[not c.isspace() for c in text] + [False] * (longest - len(text)) for text in texts])
    before = F.pad(inked.long().cumsum(1), (1, 0))  # (N, longest + 1): non-space characters before each position
    spans = before.gather(1, encoded.pop("offset_mapping").flatten(1)).unflatten(1, (-1, 2))
    return encoded, spans * (1 - encoded["special_tokens_mask"])[..., None]


def align_tokens(teacher: Tensor, teacher_spans: Tensor, student_spans: Tensor) -> tuple[Tensor, Tensor]:
    """Average the teacher's tokens for every student token, weighted by the number of shared characters.

    Args:
        teacher: `(N, U, D)` states of the teacher's tokens.
        teacher_spans: `(N, U, 2)` from `tokenize_with_spans`.
        student_spans: `(N, T, 2)`, likewise.

    Returns:
        States `(N, T, D)`, and bool `(N, T)`: True where a student token overlaps a teacher token; other states are 0.
    """
    first = torch.maximum(student_spans[:, :, None, 0], teacher_spans[:, None, :, 0])
    last = torch.minimum(student_spans[:, :, None, 1], teacher_spans[:, None, :, 1])
    overlap = (last - first).clamp(min=0).to(teacher.dtype)
    total = overlap.sum(2, keepdim=True)
    with torch.autocast(teacher.device.type, enabled=False):
        return (overlap / total.clamp(min=1)) @ teacher, total.squeeze(2) > 0
