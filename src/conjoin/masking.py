"""`qda_threshold` under its public name; the function is part of `conjoin.methods.solar`."""

from conjoin.methods.solar.masking import qda_threshold

__all__ = ["qda_threshold"]
