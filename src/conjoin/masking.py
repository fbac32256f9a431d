"""`qda_threshold` under its public name; the function is part of `conjoin.methods.solar`."""

from conjoin.methods.solar.masking.threshold import qda_threshold

__all__ = ["qda_threshold"]
