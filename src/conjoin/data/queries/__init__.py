"""Queries with positives and negatives from tables of one's own: JSON lines, Parquet, CSV or a Hub dataset."""
