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
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput
from conjoin.processing import ImageTextProcessor, ItemError, load_image
from conjoin.processing.item_inputs import cut_text, item_names, text_limit, without_special_words


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


class TowerTeacher:
    """Uses the student's frozen towers as teachers; suits towers that are the paper's teachers (DINOv2, BGE-m3).

    The student's forward already computes their output, so this teacher adds no cost.

    Args:
        model: The student.

    Raises:
        ValueError: A tower is trainable.
    """

    def __init__(self, model: JointEncoderModel) -> None:
        for name, tower in (("vision_model", model.vision_model), ("text_model", model.text_model)):
            if any(parameter.requires_grad for parameter in tower.parameters()):
                raise ValueError(f"{name} is being trained, so it cannot be its own teacher: pass a teacher")

    def __call__(self, teacher_inputs: dict[str, Any], output: JointEncoderOutput) -> TeacherTargets:
        """Return the towers' tokens before the adapters."""
        image, text, mask = output.image_features, output.text_features, output.text_token_mask
        if image is None or text is None or mask is None:
            raise ValueError("expected the output for image-text pairs, with output_tokens=True")
        image, text = image.detach(), text.detach()
        return TeacherTargets(image[:, 1:], image[:, 0], text[:, 1:], text[:, 0], mask)


IMAGE_TARGETS = ("image_tokens", "image_global")
TEXT_TARGETS = ("text_tokens", "text_global")


class VisionTeacher:
    """A frozen vision model on the student's patches (DINOv2 in the paper).

    Args:
        model: Any transformers vision model with patches.
        image_processor: Its image processor, used for colour statistics and resampling; crop and resolution follow
            the student.

    Raises:
        ValueError: The model has no patches.
    """

    def __init__(self, model: PreTrainedModel, image_processor: Any) -> None:  # noqa: ANN401
        if "patch_size" not in model.config.to_dict():
            raise ValueError(f"{type(model).__name__} has no patches (no patch_size), so it cannot teach patches")
        self.model = _frozen(model)
        self.image_processor = image_processor

    @classmethod
    def from_pretrained(cls, name: str, dtype: torch.dtype | None = None) -> Self:
        """Load from a model id or folder; from a two-tower checkpoint (CLIP, SigLIP) load its vision tower."""
        with loading(name):
            model = AutoModel.from_pretrained(name, dtype=dtype or torch.float32, trust_remote_code=False)
            image_processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        tower = model.vision_model if "vision_config" in model.config.sub_configs else model
        return cls(tower, image_processor)

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.model.config.patch_size

    @torch.no_grad()
    def __call__(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local `(N, P, D)`, row-major, and global (CLS) `(N, D)` states of `pixel_values` `(N, 3, H, W)`.

        Raises:
            ValueError: The model has neither a CLS token nor a pooled state.
        """
        nn.Module.to(self.model, pixel_values.device)
        arguments = inspect.signature(self.model.forward).parameters
        extra = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in arguments else {}
        with torch.autocast(pixel_values.device.type, enabled=False):
            output = self.model(pixel_values=pixel_values.to(self.model.dtype), **extra)
        states = output.last_hidden_state
        height, width = (side // self.patch_size for side in pixel_values.shape[-2:])
        num_prefix = states.shape[1] - height * width  # CLS and register tokens
        pooled = states[:, 0] if num_prefix else output.pooler_output
        if pooled is None:
            raise ValueError(f"{type(self.model).__name__} has neither a CLS token nor a pooled state")
        return states[:, num_prefix:], pooled


class TextTeacher:
    """A frozen text model with its own tokenizer (BGE-m3 in the paper).

    Args:
        model: Any transformers text model whose first token is CLS.
        tokenizer: Its fast tokenizer.
        max_length: Maximum text length in tokens; None for the tokenizer's limit.
        global_model: Computes the global state instead of `model`, from the same tokens (the paper takes token states
            from BGE-m3-retromae and global states from BGE-m3).

    Raises:
        ValueError: A model has a vision part, the tokenizer is slow, or the vocabulary sizes of both models differ.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        global_model: PreTrainedModel | None = None,
    ) -> None:
        for each in (model, global_model or model):
            if "vision_config" in each.config.sub_configs or "patch_size" in each.config.to_dict():
                raise ValueError(f"{type(each).__name__} is no text encoder, so it cannot teach words")
        sizes = [each.config.get_text_config().vocab_size for each in (model, global_model or model)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"model and global_model read the same tokens, but their vocabularies have sizes {sizes}")
        self.model = _frozen(model)
        self.global_model = None if global_model is None else _frozen(global_model)
        self.tokenizer = tokenizer
        self.max_length = max_length
        tokenize_with_spans(tokenizer, ["a"])

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        max_length: int | None = None,
        global_model: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Load from model ids or folders."""
        dtype = dtype or torch.float32
        with loading(name):
            model = AutoModel.from_pretrained(name, dtype=dtype, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        with loading(global_model or name):
            pooling = (
                None
                if global_model is None
                else AutoModel.from_pretrained(global_model, dtype=dtype, trust_remote_code=False)
            )
        return cls(model, tokenizer, max_length, pooling)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of all tokens `(N, U, D)`, 0 at the padding, and the global (CLS) state `(N, D')`."""
        outputs = []
        for model in (self.model,) if self.global_model is None else (self.model, self.global_model):
            nn.Module.to(model, input_ids.device)
            with torch.autocast(input_ids.device.type, enabled=False):
                outputs.append(model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        return outputs[0].masked_fill(attention_mask[..., None] == 0, 0.0), outputs[-1][:, 0]


class Teachers:
    """Both teachers, for `SolarStage1Trainer`; the trainer also needs the matching `TeacherCollator`.

    Args:
        vision: Teacher of patches and images.
        text: Teacher of tokens and texts.
    """

    def __init__(self, vision: VisionTeacher, text: TextTeacher) -> None:
        self.vision, self.text = vision, text

    def __call__(self, teacher_inputs: Mapping[str, Any], output: JointEncoderOutput) -> TeacherTargets:
        """Return the targets for a batch of `TeacherCollator`, aligned to the student's tokens.

        Raises:
            ValueError: The batch has no teacher inputs, or their patch grid or tokens do not match the student's.
        """
        states = {name: state.float() for name, state in self.states(teacher_inputs).items()}
        mask = cast(Tensor, output.text_token_mask)
        tokens, known = align_tokens(
            states["text_tokens"], teacher_inputs["text_spans"], teacher_inputs["student_spans"]
        )
        image = states["image_tokens"]
        for name, ours, students in (("patches", image, output.image_token_mask), ("text tokens", tokens, mask)):
            if students is None or ours.shape[:2] != students.shape:
                raise ValueError(
                    f"the student has {None if students is None else tuple(students.shape)} {name} (N, T), "
                    f"the teacher {tuple(ours.shape[:2])}"
                )
        return TeacherTargets(image, states["image_global"], tokens, states["text_global"], known & mask.bool())

    def states(self, teacher_inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the teachers' states for a batch, named as in `IMAGE_TARGETS` and `TEXT_TARGETS`.

        States that the batch already contains, from a cache, are returned unchanged.
        """
        needed = {"pixel_values", *IMAGE_TARGETS}, {"input_ids", *TEXT_TARGETS}
        if not all(names & teacher_inputs.keys() for names in needed):
            raise ValueError(
                f"the batch has no teacher inputs, only {sorted(teacher_inputs)}; collate it by TeacherCollator"
            )
        states = {name: teacher_inputs[name] for name in (*IMAGE_TARGETS, *TEXT_TARGETS) if name in teacher_inputs}
        if "pixel_values" in teacher_inputs:
            states |= dict(zip(IMAGE_TARGETS, self.vision(teacher_inputs["pixel_values"]), strict=True))
        if "input_ids" in teacher_inputs:
            of_texts = self.text(teacher_inputs["input_ids"], teacher_inputs["attention_mask"])
            states |= dict(zip(TEXT_TARGETS, of_texts, strict=True))
        return states


class TeacherCollator:
    """Collates rows of pairs into the student's batch, with the teachers' inputs as `teacher` in the part `pairs`.

    Dimension 0 of every tensor is the row. The collator holds no model, so data-loader workers can use it. Rows with
    the states of a `TeacherCache` in `teacher` need no teacher inputs.

    Args:
        processor: The student's processor.
        patch_size: The student's patch size in pixels.
        teachers: The teachers to prepare inputs for.

    Raises:
        ValueError: The student's tokenizer is slow; on a call, a row lacks its image or text.
    """

    def __init__(self, processor: ImageTextProcessor, patch_size: int, teachers: Teachers) -> None:
        self.collator = PairCollator(processor)
        self.processor = processor
        self.patch_size = patch_size
        self.teacher_patch_size = teachers.vision.patch_size
        self.image_processor = matching_image_processor(
            processor.image_processor, teachers.vision.image_processor, self.teacher_patch_size, patch_size
        )
        self.tokenizer, self.max_length = teachers.text.tokenizer, teachers.text.max_length
        tokenize_with_spans(processor.tokenizer, ["a"])
        size = processor(images=[Image.new("RGB", (32, 32))])["pixel_values"].shape[-2:]
        self.grid = [side // patch_size for side in size]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = item_names(len(rows), [str(row.get("id", index)) for index, row in enumerate(rows)])
        lacking = [
            name for row, name in zip(rows, names, strict=True) if row.get("image") is None or not row.get("text")
        ]
        if lacking:
            raise ValueError(f"teachers need an image and a text in every row: {', '.join(lacking[:3])}")
        several = [name for row, name in zip(rows, names, strict=True) if isinstance(row["image"], list | tuple)]
        if several:
            raise ValueError(f"teachers need one image in every row, not a list of images: {', '.join(several[:3])}")
        batch = self.collator(rows)
        texts = [row["text"].strip() for row in rows]
        teacher_inputs: dict[str, Tensor] = {}
        encoded, teacher_inputs["student_spans"] = self.tokenize_student(texts)
        tokens = zip(names, _tokens(encoded), _tokens(batch["pairs"]), strict=True)
        differing = [name for name, ours, theirs in tokens if ours != theirs]
        if differing:
            raise ItemError(
                differing[0], "the processor and its tokenizer give different tokens, so they cannot be aligned"
            )
        encoded, teacher_inputs["text_spans"] = self.tokenize(texts)
        known = [row.get("teacher", {}) for row in rows]
        if known[0]:
            teacher_inputs |= {
                name: _stack([states[name] for states in known]) for name in (*IMAGE_TARGETS, *TEXT_TARGETS)
            }
        else:
            teacher_inputs |= {name: encoded[name] for name in ("input_ids", "attention_mask")}
            pixels = [self.pixels([load_image(row["image"], name)]) for row, name in zip(rows, names, strict=True)]
            teacher_inputs["pixel_values"] = torch.cat(pixels)
        batch["pairs"]["teacher"] = teacher_inputs
        return batch

    def tokenize_student(self, texts: Sequence[str]) -> tuple[BatchEncoding, Tensor]:
        """Return the student's tokens, identical to its processor's output, and their spans."""
        processor = self.processor
        return tokenize_with_spans(processor.tokenizer, texts, processor.max_text_length, processor.text_padding)

    def tokenize(self, texts: Sequence[str]) -> tuple[BatchEncoding, Tensor]:
        """Return the text teacher's tokens, padded on the right, and their spans."""
        return tokenize_with_spans(self.tokenizer, texts, self.max_length, padding_side="right")

    def pixels(self, images: Sequence[Image.Image]) -> Tensor:
        """Return the vision teacher's input `(N, 3, H, W)`, cropped to the student's patches."""
        pixels = self.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        height, width = (side * self.teacher_patch_size for side in self.grid)
        if pixels.shape[-2] < height or pixels.shape[-1] < width:
            raise ValueError(
                f"the teacher's image processor gives {tuple(pixels.shape[-2:])} pixels, but the student's grid needs "
                f"{(height, width)}"
            )
        return pixels[..., :height, :width].contiguous()


def matching_image_processor(student: Any, teacher: Any, teacher_patch_size: int, patch_size: int) -> Any:  # noqa: ANN401
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


def _tokens(encoded: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of each text, without padding."""
    return [
        ids[mask.bool()].tolist() for ids, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
    ]


def _stack(states: Sequence[Tensor]) -> Tensor:
    """Stack states; states of texts `(U, D)` are padded with zeros on the right."""
    return nn.utils.rnn.pad_sequence(list(states), batch_first=True)


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return model.requires_grad_(False).eval()


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

    Raises:
        ValueError: The tokenizer is slow and does not report character offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer: it does not report the character offsets of its "
            "tokens, so a teacher cannot be aligned"
        )
    limit = text_limit(tokenizer, max_length)
    if limit is not None:
        texts = [cut_text(text, tokenizer, limit) for text in texts]
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
