"""What an artifact proves of itself and of its source, without the run that made it."""
