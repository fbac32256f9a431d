"""Indexes: one protocol, one file per backend."""
