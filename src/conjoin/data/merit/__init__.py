"""MERIT: queries that interleave several product images with text; layout, rows and a miniature."""
