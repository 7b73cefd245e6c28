"""Where sources are read from and results go: folders, hub caches, object stores."""
