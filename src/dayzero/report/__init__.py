"""Measuring a served model from outside and turning the records of a run into an acceptance report. `core` only."""
