"""Any architecture with one layer in memory: calibrated codes, and what fewer bits do to the model on text."""
