"""The joint encoder of SOLAR / SUMMR."""

from transformers import AutoConfig, AutoModel

from .configuration_joint_encoder import JointEncoderConfig as JointEncoderConfig
from .modeling_joint_encoder import JointEncoderModel as JointEncoderModel, JointEncoderOutput as JointEncoderOutput

AutoConfig.register("joint_encoder", JointEncoderConfig, exist_ok=True)
AutoModel.register(JointEncoderConfig, JointEncoderModel, exist_ok=True)
JointEncoderConfig.register_for_auto_class()
JointEncoderModel.register_for_auto_class("AutoModel")
