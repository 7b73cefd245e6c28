"""Damage to small checkpoints: what each kind is, who can tell, and whether DayZero and today's tools do."""
