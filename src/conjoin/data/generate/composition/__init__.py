"""Queries of several conditions, composed from a catalogue of products with attributes (MERIT App. A.3)."""
