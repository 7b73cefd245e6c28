"""Tiny models and release folders of any decoder type, generated (nothing is downloaded)."""
