"""Distillation targets of SOLAR's stage 1, and the simplest teacher: the student's own frozen towers."""

from typing import Any, NamedTuple

from torch import Tensor

from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput


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
