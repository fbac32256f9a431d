"""Training with weights that are sharded over the devices by FSDP2, as the launch file says."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from conjoin.losses.temperature import Temperature
from conjoin.models.shortcuts import use_shortcuts
from conjoin.trainers.peft import merge_lora_weights

if TYPE_CHECKING:
    from conjoin.trainers.base import Step

FORWARDS = ("embed", "terms", "encode")
"""The methods of a `Step` that a trainer calls besides `forward`; each of them needs whole weights."""
ENCODER = "encoder."


class Sharding(TrainerCallback):
    """What differs in a trainer if the launch file chose FSDP; without it it changes nothing.

    Args:
        accelerator: Of the trainer.
        step: Not yet sharded.

    Attributes:
        fsdp: Whether the launch file chose FSDP.

    Raises:
        ValueError: The launch file chose DeepSpeed, or the first version of FSDP.
    """

    def __init__(self, accelerator: Accelerator, step: "Step") -> None:
        self.accelerator, self.step = accelerator, step
        self.scalars: list[str] = []
        self.fsdp = accelerator.distributed_type == DistributedType.FSDP
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError("DeepSpeed is not supported; shard the state of training by FSDP2 (accelerate/fsdp.yaml)")
        # shortcuts depend on the batch; devices that share weights must run the same layers
        use_shortcuts(step.encoder, enabled=not self.fsdp)
        if not self.fsdp:
            return
        plugin: Any = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise ValueError(f"fsdp_version is {plugin.fsdp_version}; expected 2 in the launch file (--config_file)")
        for name, parameter in step.named_parameters():
            if parameter.ndim == 0:  # FSDP shards a dimension
                parameter.data = parameter.data.reshape(1)
                self.scalars.append(name)
        if plugin.mixed_precision_policy is not None:  # gradients are summed in float32
            dtype = plugin.mixed_precision_policy.param_dtype
            plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let FSDP gather the weights for all of `FORWARDS`, and expect layers that only some devices run."""
        model: Any = self.step
        if not isinstance(model, FSDPModule) or "embed" in vars(model):
            return
        for name in FORWARDS:
            register_fsdp_forward_method(self.step, name)
        if not self.step.trainer.same_layers and hasattr(model, "set_reduce_scatter_unused_params"):  # of newer torch
            model.set_reduce_scatter_unused_params(True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clamp learned temperatures: their forward clamps a copy of what FSDP holds."""
        if self.fsdp:
            for module in self.step.modules():
                if isinstance(module, Temperature):
                    module.clamp()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision of a forward: accelerate sets that of FSDP2 for the weights alone."""
        return self.accelerator.autocast() if self.fsdp else nullcontext()

    def max_over_devices(self, count: int) -> int:
        """Return the largest `count` of all devices if the weights are sharded, else `count`."""
        if not self.fsdp:
            return count
        largest = torch.tensor(count, device=self.accelerator.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of encoder and loss; sharded ones are gathered on the main process.

        All processes must call this. On the others the result is incomplete.
        """
        if not self.fsdp:
            return self.step.state_dict()
        state = self.accelerator.get_state_dict(self.step)
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}

    def encoder_weights(self) -> dict[str, Tensor] | None:
        """Gather the weights of the encoder, with its LoRA adapters merged; None if they are not sharded."""
        if not self.fsdp:
            return None
        state = self.weights()
        if not self.accelerator.is_main_process:
            return state
        state |= {name: state[name].reshape(()) for name in self.scalars if name in state}
        weights = {name.removeprefix(ENCODER): value for name, value in state.items() if name.startswith(ENCODER)}
        return merge_lora_weights(self.step.encoder, weights)
