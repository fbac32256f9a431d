"""Trainers: one file per method, in the shape of `transformers.Trainer`."""
