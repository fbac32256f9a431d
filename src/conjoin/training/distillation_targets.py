"""What a student of SOLAR's stage 1 imitates, and the simplest teacher: its own towers, frozen."""

from typing import Any, NamedTuple

from torch import Tensor

from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput


class TeacherTargets(NamedTuple):
    """A teacher's view of a batch, aligned to the student's tokens; widths may differ from the student's.

    Args:
        image_tokens: `(N, P, D)`.
        image_global: `(N, D)`.
        text_tokens: `(N, T, D')`.
        text_global: `(N, D')`.
        text_mask: `(N, T)` bool, the student tokens that the teacher has something to say about.
    """

    image_tokens: Tensor
    image_global: Tensor
    text_tokens: Tensor
    text_global: Tensor
    text_mask: Tensor


class TowerTeacher:
    """The student's own towers as teachers: right when these are the teachers anyway (DINOv2 + BGE-m3), and frozen.

    Their output is at hand, so it costs nothing.

    Args:
        model: The student.

    Raises:
        ValueError: A tower is being trained.
    """

    def __init__(self, model: JointEncoderModel) -> None:
        for name, tower in (("vision_model", model.vision_model), ("text_model", model.text_model)):
            if any(parameter.requires_grad for parameter in tower.parameters()):
                raise ValueError(f"{name} is being trained, so it cannot be its own teacher: pass a teacher")

    def __call__(self, batch: dict[str, Any], output: JointEncoderOutput) -> TeacherTargets:
        """The towers' tokens before the adapters."""
        image, text, mask = output.image_features, output.text_features, output.text_token_mask
        if image is None or text is None or mask is None:
            raise ValueError("expected the output on image-text pairs, with output_tokens=True")
        image, text = image.detach(), text.detach()
        return TeacherTargets(image[:, 1:], image[:, 0], text[:, 1:], text[:, 0], mask)
