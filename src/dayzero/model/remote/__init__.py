"""Releases from elsewhere: their own code, confined, and folders on a web server, read by range."""
