"""Generators of data: query composition, symmetric construction, the mini data sets."""
