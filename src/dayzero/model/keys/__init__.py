"""A description of a model from the keys of its config alone: no class, no torch, no transformers.

`tables` says which spellings mean what, `reader` looks them up and keeps the account, `layer_pattern` says what each layer
is, `mixers`, `linear_mixers`, `compressed` and `feed_forwards` count one layer, `towers` what stands beside the decoder.
"""
