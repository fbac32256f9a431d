"""Generators of data: query composition, symmetric construction, scenes, the mini data sets."""
