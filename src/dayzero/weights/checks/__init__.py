"""What is looked at beside names and shapes: values as they pass, and digests that a publisher gave."""
