"""Quantized and packed forms that releases use, decoded to the numbers they stand for."""
