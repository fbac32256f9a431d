"""Generators of data: query composition and symmetric construction."""
