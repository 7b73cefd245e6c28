"""The operator graph of a layer: calls recorded at several lengths, generalised to any length, costed, and run again.

`record` watches a forward, `fit` finds the formula of a size that moves with the length, `unify` makes one graph of several
recordings, `cost` says what its nodes are and cost, `rerun` executes it.
"""
