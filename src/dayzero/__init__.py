"""DayZero: from a freshly published model and a target to a served, validated model and an acceptance report."""

__version__ = "0.1.0"
