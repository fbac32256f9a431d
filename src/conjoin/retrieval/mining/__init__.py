"""Hard negatives mined with several encoders."""
