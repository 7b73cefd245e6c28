"""Weights in fewer bits: presets, the arithmetic of codes, which parameters, calibration, and the evidence of what it costs."""
