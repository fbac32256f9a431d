"""Choice of the device."""

import torch


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """Return `device`; if None, a GPU if there is one, else the CPU.

    Raises:
        ValueError: Torch does not know the device, or does not see the GPU.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is not a device; expected cpu, cuda, cuda:1, ...") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{chosen} was asked for, but torch sees no GPU; use --device cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{chosen} was asked for, but torch sees {torch.cuda.device_count()} GPUs, counted from 0")
    return chosen
