"""The `convert` verb: what to convert for, where to, and what to print. Stands between the command line and `weights`."""
